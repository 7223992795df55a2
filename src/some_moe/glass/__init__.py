"""The glass box: look inside a run. `api` is the way in; `inspect` measures, `figures` draws, `page` writes."""

MAX_TOKENS = 20_000  # replayed where nobody asks for more or fewer
FILE = "file "  # before the name of a text that is no split of the run's own


def name_text(split: str | None) -> str:
    """What was replayed, as a phrase."""
    return "one split" if not split else f"the {split}" if split.startswith(FILE) else f"the {split} split"
