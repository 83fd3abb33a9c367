"""The gRPC interface and its generated code (`tools/gen_proto`)."""
