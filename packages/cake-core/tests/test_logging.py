"""The logger "cake": CAKE_LOG and configure set its level; it prints only where nothing else would."""

from __future__ import annotations

import os
import subprocess
import sys


def run(code: str, **env: str) -> tuple[str, str]:
    """stdout and stderr of a fresh process."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("CAKE_")}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**clean, **env}, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


SAY = "import cake.core, logging; log = logging.getLogger('cake.x'); log.info('one'); log.warning('two')"


def test_by_default_warnings_alone_are_seen() -> None:
    assert run(SAY) == ("", "two\n")


def test_cake_log_sets_the_level() -> None:
    assert run(SAY, CAKE_LOG="info") == ("", "[cake.x] INFO: one\n[cake.x] WARNING: two\n")
    assert run(SAY, CAKE_LOG="ERROR") == ("", "")
    assert run(SAY, CAKE_LOG="") == ("", "two\n")


def test_an_unknown_level_is_a_warning_and_no_failure() -> None:
    _, err = run(SAY, CAKE_LOG="loud")
    assert "CAKE_LOG" in err
    assert "'loud'" in err
    assert err.endswith("two\n")


def test_cake_fla_without_flash_linear_attention_is_a_warning_when_cake_is_imported() -> None:
    hide = "import importlib.metadata as m, sys\nm.version = lambda name: sys.modules['none of this']"
    absent = f"{hide}\nm.PackageNotFoundError = KeyError"
    told = run(f"{absent}\nimport cake.core", CAKE_FLA="1")[1]
    assert "CAKE_FLA is set and has no effect" in told
    assert "flash-linear-attention isn't installed" in told
    assert run("import cake.core", CAKE_FLA="0") == ("", "")
    assert "CAKE_FLA" in run("import cake.core", CAKE_FLA="maybe")[1]


def test_configure_wins_over_the_environment() -> None:
    code = SAY.replace("log.info", "cake.core.configure(cake_log='info'); log.info")
    _, err = run(code, CAKE_LOG="error")
    assert "[cake.x] INFO: one\n" in err


def test_a_program_with_its_own_handlers_prints_each_line_once() -> None:
    code = (
        "import logging, sys; logging.basicConfig(stream=sys.stdout, format='own %(message)s', level=0)\n"
        + SAY
    )
    assert run(code, CAKE_LOG="info") == ("own one\nown two\n", "")


def test_a_configuration_is_logged() -> None:
    _, err = run("import cake.core; cake.core.configure(deterministic_mode=True)", CAKE_LOG="info")
    assert "deterministic=True (configure())" in err


def test_the_level_goes_with_the_configuration_that_set_it() -> None:
    code = (
        "import logging\n"
        "from cake.core import config\n"
        "log = logging.getLogger('cake')\n"
        "log.setLevel(17)\n"
        "config.configure(cake_log='error')\n"
        "assert log.level == logging.ERROR and len(log.handlers) == 1\n"
        "with config.temporary(cake_log='debug'):\n"
        "    assert log.level == logging.DEBUG and len(log.handlers) == 1\n"
        "assert log.level == logging.ERROR\n"
        "config.configure()\n"
        "assert log.level == 17 and not log.handlers\n"
        "config.configure(cake_log='error')\n"
        "config.reset()\n"
        "assert log.level == 17 and not log.handlers\n"
    )
    run(code)


def test_without_a_configured_level_the_environments_holds_again() -> None:
    code = (
        "import logging\n"
        "from cake.core import config\n"
        "log = logging.getLogger('cake')\n"
        "config.configure(cake_log='error')\n"
        "config.configure()\n"
        "assert log.level == logging.INFO\n"
    )
    run(code, CAKE_LOG="info")
