"""HTTP and gRPC fronts over an `AsyncEngine`: `python -m jaxserve.server`.

The modules, from the wire inwards:
- `__main__`, `launcher`, `process`, `console`: the process; flags, ports, signals, what the operator sees.
- `http_app`, `completions`, `chat`, `streaming`, `sse`, `logprobs`: HTTP in OpenAI's shapes.
- `grpc_service`, `grpc_convert`, `proto`: gRPC.
- `json_body`, `schema`, `messages`, `auth`, `errors`: what is accepted, and how a refusal reads.
- `service`, `engine_api`: tokenise and submit; the engine as the fronts see it.

Nothing here decides about scheduling, and nothing logs a prompt.
"""
