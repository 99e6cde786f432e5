"""Runs examples/mpmd_tutorial.py cell by cell, as a notebook does, and plain `jax.jit` after it.

Writes as JSON what every cell printed and what its last expression is, and what plain JIT makes of
the same state.
"""

import ast
import contextlib
import io
import json
import runpy
import sys
import warnings
from functools import partial
from pathlib import Path
from typing import Any

OUT, EXAMPLES = Path(sys.argv[1]), Path(__file__).parents[2] / "examples"
SOURCE = (EXAMPLES / "mpmd_tutorial.py").read_text("utf-8")


def run(text: str, names: dict[str, Any]) -> dict[str, Any]:
    """What a cell prints, and its last expression if it is a list."""
    body = ast.parse(text).body
    last = None
    if isinstance(body[-1], ast.Expr):
        last, body = ast.Expression(body[-1].value), body[:-1]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(ast.Module(body, []), "<cell>", "exec"), names)
        value = None if last is None else eval(compile(last, "<cell>", "eval"), names)
    shown = value if isinstance(value, list) else repr(value)
    return {"code": text, "printed": printed.getvalue(), "shown": shown}


def plain_jit(names: dict[str, Any], num_steps: int) -> tuple[Any, Any]:
    """The same function on one device, where its loop is a scan."""
    import jax
    import numpy as np

    state, *data = names["inputs"]
    with jax.set_mesh(jax.sharding.Mesh(np.array(jax.devices()[:1]), ("fsdp",))):
        step = jax.jit(partial(names["train_step"], schedule=None))
        for _ in range(num_steps):
            state, loss = step(state, *data)
    return state, loss


def equal_leaves(x: Any, y: Any) -> list[bool]:
    import jax
    import numpy as np

    same = jax.tree.map(lambda x, y: bool((np.asarray(x) == np.asarray(y)).all()), x, y)
    return jax.tree.leaves(same)


warnings.filterwarnings("ignore", category=DeprecationWarning)  # `with mesh:` of the document
names: dict[str, Any] = {"__name__": "__main__"}
shown = [
    run(cell.text, names)
    for cell in runpy.run_path(str(EXAMPLES / "to_notebook.py"))["cells"](SOURCE)
    if cell.is_code
]
state, loss = plain_jit(names, num_steps=6)
staged, interleaved = names["updated_state"], names["updated_state_interleaved"]
result = {
    "cells": shown,
    "loss": float(loss),
    "interleaved_is_staged": equal_leaves(interleaved.params, staged.params),
    "staged_is_plain": equal_leaves(staged.params, state.params),
    "folder": str(Path.cwd()),
}
OUT.write_text(json.dumps(result, default=repr), "utf-8")
