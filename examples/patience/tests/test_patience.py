from specstop.policies.testing import TreePolicyTests
from specstop_patience import Patience


class TestPatience(TreePolicyTests):
    def make(self) -> Patience:
        return Patience(2)
