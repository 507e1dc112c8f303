"""What if: other costs of the draft, other places of use."""
