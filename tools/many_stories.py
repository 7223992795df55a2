"""Write stories of any amount into a file, to try out large sources: `python -m tools.many_stories 2e9 stories.jsonl`.

Telling two gigabytes takes a quarter of an hour; so ten thousand stories are told, and the begin of each is joined to
the end of every other in turn. No two lines are the same.
"""

import json
import sys
from collections.abc import Iterator
from itertools import count
from pathlib import Path

from some_moe.stories.generator import tell_many

TOLD = 10_000


def join_halves() -> Iterator[str]:
    halves = []
    for story in tell_many(TOLD):
        middle = story.text.find(". ", len(story.text) // 2) + 2
        halves.append((story.text[:middle], story.text[middle:]))
    for apart in count():
        for place, (begin, _) in enumerate(halves):
            yield begin + halves[(place + apart) % TOLD][1]


def main(size: str, path: str) -> None:
    left = int(float(size))
    with Path(path).open("w", encoding="utf-8") as file:
        for text in join_halves():
            left -= file.write(json.dumps({"text": text}) + "\n")
            if left <= 0:
                break


if __name__ == "__main__":
    main(*sys.argv[1:])
