"""Inside serving engines: a trained policy where the engine drafts.

| module | what |
|---|---|
| `vllm` | the class that vLLM drafts with (`--speculative-config '{"method": "custom_class", ...}'`) |
| `vllm_plugin` | coefficients of a trained policy for vLLM's adaptive verification |
| `sglang` | a trained rule instead of SGLang's adaptive steps |
| `drafting`, `drafters`, `rows`, `settings` | drafting for all requests of any engine side by side |

Nothing here imports an engine before it runs in one.
"""
