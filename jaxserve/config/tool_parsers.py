"""Names of the tool parsers."""

TOOL_CALL_PARSERS = ("deepseek_v3", "granite", "hermes", "llama3_json", "mistral", "pythonic", "qwen3_coder")
"""See `jaxserve.text.tool_calls`."""
AUTO_TOOL_CALL_PARSER = "auto"
"""The one that the chat template tells."""
