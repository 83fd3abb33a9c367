"""Files of API keys."""

import pytest

from jaxserve.config.api_keys import ApiKey, merged_keys, read_api_keys


def written(tmp_path, text):
    path = tmp_path / "keys"
    path.write_text(text)
    return path


def test_lines_are_keys_with_and_without_tenants(tmp_path):
    path = written(tmp_path, "# ours\n\nplain\nalice: a-key \n:with:colon\nteam b:c:d\n")
    keys = (ApiKey("plain"), ApiKey("a-key", "alice"), ApiKey("with:colon"), ApiKey("c:d", "team b"))
    assert read_api_keys(path) == keys


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no key"),
        ("# none\n\n", "has no key"),
        ("a\nalice:\n", "line 2: must be key or tenant:key"),
        ("a secret", "line 1: must be key or tenant:key"),
        ("secret\n\nbob:secret\n", "line 3: the key has been given before"),
        ("t" * 257 + ":secret", "line 1: the tenant has 257 characters; the limit is 256"),
    ],
)
def test_a_mistake_is_named_by_line_without_telling_a_key(tmp_path, text, message):
    with pytest.raises(ValueError, match="file") as raised:
        read_api_keys(written(tmp_path, text))
    assert message in str(raised.value) and "secret" not in str(raised.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(ValueError, match="/no/such/file"):
        read_api_keys("/no/such/file")
    (tmp_path / "keys").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="cannot be read"):
        read_api_keys(tmp_path / "keys")


def test_the_single_key_comes_on_top_and_keys_stay_out_of_repr():
    listed = (ApiKey("a", "alice"),)
    assert merged_keys(None, listed) == listed and merged_keys("b", listed) == (ApiKey("b"), *listed)
    with pytest.raises(ValueError, match="api_key is also in api_key_file"):
        merged_keys("a", listed)
    assert "secret" not in repr(ApiKey("secret", "alice"))
