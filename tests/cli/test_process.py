"""The process of a command: where it keeps compiled programs, and what it hides."""

import os
from pathlib import Path

import jax
import pytest

from jaxpipe.cli.process import quiet_stderr, set_log_levels, use_compile_cache, user_cache_folder


def test_compiled_programs_are_in_the_users_cache_folder_unless_jax_has_another(
    tmp_path: Path, monkeypatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    before = jax.config.values["jax_compilation_cache_dir"]
    try:
        for chosen in ("", str(tmp_path / "mine")):  # "" turns it off
            jax.config.update("jax_compilation_cache_dir", chosen)
            assert use_compile_cache() is None
            assert jax.config.values["jax_compilation_cache_dir"] == chosen
        jax.config.update("jax_compilation_cache_dir", None)
        folder = use_compile_cache()
        assert folder == tmp_path / "jaxpipe" / "compiled"
        assert folder is not None and folder.is_dir()
        assert jax.config.values["jax_compilation_cache_dir"] == str(folder)
        jax.config.update("jax_compilation_cache_dir", None)
        monkeypatch.setenv("XDG_CACHE_HOME", str(Path(__file__)))  # no folder
        assert use_compile_cache() is None
    finally:
        jax.config.update("jax_compilation_cache_dir", before)


def test_without_xdg_the_cache_is_in_the_home():
    assert user_cache_folder({}) == Path.home() / ".cache" / "jaxpipe"
    assert user_cache_folder({"XDG_CACHE_HOME": "relative"}) == Path.home() / ".cache" / "jaxpipe"


def test_log_levels_of_the_user_win():
    environment = {"TF_CPP_MIN_LOG_LEVEL": "0"}
    set_log_levels(environment)
    assert environment["TF_CPP_MIN_LOG_LEVEL"] == "0"
    assert environment["TPU_MIN_LOG_LEVEL"] == "3"


def test_native_code_is_heard_if_it_fails_and_if_the_user_wants_it(capfd):
    with quiet_stderr():
        os.write(2, b"E0000 common_lib.cc\n")
    assert capfd.readouterr().err == ""
    with quiet_stderr(verbose=True):
        os.write(2, b"E0000 common_lib.cc\n")
    assert capfd.readouterr().err == "E0000 common_lib.cc\n"
    with pytest.raises(RuntimeError), quiet_stderr():
        os.write(2, b"no such topology\n")
        raise RuntimeError
    with pytest.raises(ValueError), quiet_stderr():
        os.write(2, b"E0000 common_lib.cc\n")
        raise ValueError
    os.write(2, b"after\n")
    assert capfd.readouterr().err == "no such topology\nafter\n"
