"""What the machine refuses becomes one sentence with its exit code, for commands and for Python."""

import errno
import os

import pytest

from some_moe.errors import BAD_INPUT, FAILED, ConfigError, FailureError, SomeError, explain, in_a_sentence


@pytest.mark.parametrize("number", [errno.ENOENT, errno.EACCES, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG])
def test_a_refused_file_is_bad_input_that_names_it_and_a_cure(number: int) -> None:
    found = explain(OSError(number, os.strerror(number), "some/file"))
    assert isinstance(found, ConfigError)
    assert found.code == BAD_INPUT
    assert str(found).startswith(f"'some/file' cannot be used ({os.strerror(number)}); ")


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left", "x"), OSError(errno.ENOSPC, "full")])
def test_a_full_disk_is_a_failure(error: OSError) -> None:
    found = explain(error)
    assert isinstance(found, FailureError)
    assert found.code == FAILED


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: you")])
def test_missing_memory_is_a_failure(error: Exception) -> None:
    assert "memory ran out" in str(explain(error))


def test_a_fault_of_this_program_is_left_as_it_is() -> None:
    assert explain(KeyError("name")) is None
    with pytest.raises(KeyError), in_a_sentence():
        raise KeyError("name")


def test_python_hears_the_same_sentence() -> None:
    @in_a_sentence()
    def read() -> None:
        with open("/no/such/file"):
            pass

    with pytest.raises(SomeError, match="'/no/such/file' cannot be used") as raised:
        read()
    assert isinstance(raised.value.__cause__, FileNotFoundError)
