"""Every command of README, docs/start and the guides is carried out, page by page, in one folder. See blocks.py."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from blocks import PAGES, Story, all_pages, read_blocks


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    story = Story(tmp_path_factory.mktemp("story"))
    yield story
    story.close()


@pytest.mark.parametrize("page", PAGES)
def test_every_command_works(page: str, story: Story) -> None:
    before = PAGES[: PAGES.index(page)]
    if before and not story.done:  # this page alone was asked for: the pages before it made what it uses
        for earlier in before:
            story.tell(earlier)
    story.tell(page)


def test_no_other_page_has_anything_to_run() -> None:
    for page in set(all_pages()) - set(PAGES):
        assert not [block.where for block in read_blocks(page) if block.info in ("bash", "python")]
