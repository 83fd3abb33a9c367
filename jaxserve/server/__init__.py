"""HTTP and gRPC fronts over an `AsyncEngine`: `python -m jaxserve.server`.

The modules, from the wire inwards:
- `__main__`, `launcher`, `process`, `console`: the process; flags, ports, signals, what the operator sees.
- `http_app`, `answering`, `completions`, `chat`, `streaming`, `sse`, `logprobs`: HTTP in OpenAI's shapes.
- `token_routes`, `operator_routes`, `metrics_export`: the rest of HTTP.
- `grpc_service`, `grpc_convert`, `grpc_guard`, `proto`: gRPC.
- `settings`, `json_body`, `schema`, `field_checks`, `messages`, `auth`, `tls`, `errors`: what is
  accepted, and how a refusal reads.
- `service`, `engine_api`: tokenise and submit; the engine as the fronts see it.

Nothing here decides about scheduling, and nothing logs a prompt.
"""
