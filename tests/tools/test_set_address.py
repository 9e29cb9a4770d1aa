"""The project's address is stated in one place, and what follows it agrees."""

import tomllib

import pytest

from tools import set_address


@pytest.fixture
def texts() -> dict[str, str]:
    return {name: (set_address.ROOT / name).read_text() for name in set_address.FILES}


def test_what_the_files_say_now_agrees_with_pyproject(texts: dict[str, str]) -> None:
    address = set_address.address_of(texts["pyproject.toml"])
    if address is None:
        assert f"git clone {set_address.UNKNOWN}" in texts["README.md"]
        assert "repo_url" not in texts["mkdocs.yml"]
    else:
        assert set_address.written(texts, address) == texts


def test_an_address_is_written_everywhere_and_replaced_by_another(texts: dict[str, str]) -> None:
    first = set_address.written(texts, "https://example.org/some-one/detjax")
    second = set_address.written(first, "https://example.com/others/detjax")
    assert second == set_address.written(texts, "https://example.com/others/detjax")
    assert set_address.address_of(second["pyproject.toml"]) == "https://example.com/others/detjax"
    assert tomllib.loads(second["pyproject.toml"])["project"]["urls"]["Issues"].endswith("/others/detjax/issues")
    assert not any("example.org" in text for text in second.values())
    for name in ("README.md", "CITATION.cff", "mkdocs.yml"):
        assert second[name].count("https://example.com/others/detjax") == 1
    assert set_address.UNKNOWN not in second["README.md"]


@pytest.mark.parametrize("address", ["detjax", "git@example.org:a/b", "https://example.org", 'https://example.org/a"b'])
def test_what_is_not_an_address_is_refused(texts: dict[str, str], address: str) -> None:
    with pytest.raises(ValueError, match="accepted: https://HOST/OWNER/NAME"):
        set_address.written(texts, address)


def test_a_file_without_a_place_for_it_is_named(texts: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=r"README\.md has 0 places"):
        set_address.written(texts | {"README.md": "nothing"}, "https://example.org/a/b")
