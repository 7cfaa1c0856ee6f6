"""Lists of hosts: the forms of a word and of a file, and a sentence for each mistake."""

from pathlib import Path

import pytest

from weft.core.errors import BadValueError, ConfigFileError
from weft.launch.host_list import Host, parse_hosts, read_hosts


def names_and_ranks(hosts: tuple[Host, ...]) -> list[tuple[str, int]]:
    return [(host.name, host.num_ranks) for host in hosts]


def test_a_word_has_names_and_ranks() -> None:
    assert names_and_ranks(read_hosts("gpu1:8, me@gpu2.site:4")) == [("gpu1", 8), ("me@gpu2.site", 4)]
    assert names_and_ranks(read_hosts("a,b:2", ranks_per_host=3)) == [("a", 3), ("b", 2)]
    assert names_and_ranks(read_hosts("[fe80::1]:2,10.0.0.7:1")) == [("[fe80::1]", 2), ("10.0.0.7", 1)]


def test_a_file_has_comments_and_the_forms_of_other_launchers(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("# rack 1\n\na 8\nb slots=4  # half broken\nc:2\n")
    assert names_and_ranks(read_hosts(str(path))) == [("a", 8), ("b", 4), ("c", 2)]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a:2,b", "b has no number of ranks"),
        ("a:0", "0 ranks"),
        ("a:2,b:1,a:2", "names a 2 times"),
        ("a:two", "'a:two' is not a host"),
        ("-oProxyCommand=x:1", "is not a host"),
        ("a b c", "is not a host"),
        ("", "names no host"),
    ],
)
def test_a_mistake_is_one_sentence_with_the_form(text: str, words: str) -> None:
    with pytest.raises(BadValueError, match=words.replace("'", ".")) as found:
        parse_hosts(text.split(","), source="the list of hosts")
    assert found.value.hint


@pytest.mark.parametrize("name", ["./hosts", "hosts.txt", "cluster.list"])
def test_a_missing_file_is_named(name: str) -> None:
    with pytest.raises(ConfigFileError, match=f"there is no host file {name}"):
        read_hosts(name, ranks_per_host=1)
