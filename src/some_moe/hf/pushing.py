"""Runs on a hub, by huggingface_hub."""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from some_moe.config import ConfigError
from some_moe.errors import FailureError, in_a_sentence
from some_moe.hf.exporting import export, is_export, tell
from some_moe.system.reading import clean

LOGIN = "log in by `hf auth login`, or set HF_TOKEN"


@in_a_sentence()
def push(
    run: str | Path,
    repo: str,
    *,
    private: bool = False,
    revision: str | None = None,
    message: str = "Upload by some push",
    endpoint: str | None = None,
    token: str | None = None,
    say: Callable[[str], None] = lambda _: None,
    **options: Any,
) -> str:
    """Export a run and upload it, or upload a folder that was exported; returns its address.

    repo: OWNER/NAME; it is made where it is not there, for its owner alone if `private`. revision: a branch that is
    there (main). endpoint, token: of the hub, where HF_ENDPOINT and HF_TOKEN are not to say it. options: see `export`.
    """
    from huggingface_hub import HfApi

    api = HfApi(endpoint=endpoint, token=token)
    refuse_bad_name(repo)
    with explaining(api.endpoint, repo):
        api.whoami()  # whoever is not logged in hears of it before anything is made
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(run)
        if not is_export(folder):
            folder = export(folder, Path(scratch) / "model", say=say, **options)
        say(f"uploading to {repo} …")
        with explaining(api.endpoint, repo):
            api.create_repo(repo, private=private, exist_ok=True)
            api.upload_folder(repo_id=repo, folder_path=folder, revision=revision, commit_message=message)
    return f"{api.endpoint}/{repo}"


def refuse_bad_name(repo: str) -> None:
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(repo)
    except HFValidationError:
        raise ConfigError(f"{clean(repo)!r} is no name of a repository; write it as OWNER/NAME") from None


@contextmanager
def explaining(endpoint: str, repo: str) -> Iterator[None]:
    """Say in a sentence what a hub refuses, or that it cannot be reached."""
    from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError, OfflineModeIsEnabled

    try:
        yield
    except LocalTokenNotFoundError:
        raise ConfigError(f"no token for {endpoint} was found; {LOGIN}") from None
    except OfflineModeIsEnabled:
        raise ConfigError("HF_HUB_OFFLINE is set, so nothing is uploaded; unset it") from None
    except HfHubHTTPError as error:
        status = getattr(error.response, "status_code", None)
        if status in (401, 403):
            raise ConfigError(f"{endpoint} does not let this token write to {repo!r} ({status}); {LOGIN}") from None
        told = tell(error.server_message or error)
        raise FailureError(f"{endpoint} refuses {repo!r} ({status}: {told}); try it again later") from None
    except Exception as error:  # of whatever library speaks HTTP, or one that stands for it
        told = tell(error.__cause__ or error)
        raise FailureError(f"{endpoint} cannot be reached ({told}); check the connection, or HF_ENDPOINT") from error
