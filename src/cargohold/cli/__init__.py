"""The cargohold command."""

import sys

__all__ = ["main"]


def main() -> int:
    """Run the command line; the exit status."""
    # What takes time to import is imported here, where Ctrl-C can be answered like at any later moment.
    try:
        from cargohold.cli.entry import main as run_command_line  # noqa: PLC0415
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return 130
    return run_command_line()
