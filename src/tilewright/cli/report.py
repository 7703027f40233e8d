"""`tilewright report`: one HTML page about a package."""

from __future__ import annotations

import argparse
from pathlib import Path


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("package", type=Path, help="the .tpupkg file")
    parser.add_argument("--output", "-o", type=Path, help="HTML file to write (PACKAGE.html)")


def run(options: argparse.Namespace) -> int:
    """Run the command."""
    from tilewright.cli.compile import write_html
    from tilewright.cli.output import print_json
    from tilewright.cli.progress import Progress
    from tilewright.codegen.files import check_writable
    from tilewright.report.report import make_report
    from tilewright.runtime.runtime import load
    from tilewright.runtime.simulation import simulate

    output = options.output or options.package.with_suffix(".html")
    check_writable(output, options.package)
    package = load(options.package)
    with Progress(options.quiet) as progress:
        progress("simulate")
        report = make_report(package, simulate(package))
        write_html(output, report)
    if options.json:
        print_json({"path": str(output), "report": report.to_json()})
    else:
        print(output)
    return 0
