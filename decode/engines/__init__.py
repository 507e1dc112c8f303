"""Inside serving engines: a trained policy where the engine drafts.

| module | what |
|---|---|
| `vllm` | the class that vLLM drafts with (`--speculative-config '{"method": "custom_class", ...}'`) |
| `vllm_plugin` | coefficients of a trained policy for vLLM's adaptive verification |
| `sglang` | a trained rule in the place of SGLang's adaptive steps |
| `drafting`, `source`, `rows` | what drafts for all requests of an engine side by side, and knows no engine |
| `models`, `drafters` | a draft model there, and any other drafter that reads no hidden states |

Nothing here imports an engine before it runs in one.
"""
