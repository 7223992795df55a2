"""The glass box: look inside a run. `api` is the way in; `inspect` measures, `figures` draws, `page` writes."""

MAX_TOKENS = 20_000  # replayed where nobody asks for more or fewer
