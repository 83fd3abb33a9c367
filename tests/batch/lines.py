"""Input lines and results, for the tests of this folder."""

import json
from pathlib import Path


def completion(custom_id, prompt="a", **body):
    """A request line of /v1/completions."""
    return _line(custom_id, "/v1/completions", {"prompt": prompt, "max_tokens": 4, "temperature": 0} | body)


def chat(custom_id, content="a", **body):
    """A request line of /v1/chat/completions."""
    messages = [{"role": "user", "content": content}]
    return _line(custom_id, "/v1/chat/completions", {"messages": messages, "max_tokens": 4, "temperature": 0} | body)


def write_lines(path, lines):
    """Writes lines: dicts as JSON, strings as they are."""
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    Path(path).write_text("".join(text + "\n" for text in texts))
    return path


def read_results(path):
    """The results of a file, every line of which must be whole."""
    text = Path(path).read_text()
    assert not text or text.endswith("\n")
    return [json.loads(line) for line in text.splitlines()]


def texts_by_id(path):
    """custom_id -> text of the first choice; fails when an id comes twice."""
    results = read_results(path)
    texts = {}
    for result in results:
        choice = result["response"]["body"]["choices"][0]
        texts[result["custom_id"]] = choice["text"] if "text" in choice else choice["message"]["content"]
    assert len(texts) == len(results), "an id came twice"
    return texts


def _line(custom_id, url, body):
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}
