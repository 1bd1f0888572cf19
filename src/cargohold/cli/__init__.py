"""The cargohold command."""

__all__ = ["main"]


def main() -> int:
    """Run the command line; returns the exit status."""
    from cargohold.cli.signals import interrupted, termination  # noqa: PLC0415  # not a name of this package

    with termination.handled():
        # Modules that take time to import are imported here, where Ctrl-C is answered as at any later moment.
        try:
            from cargohold.cli.entry import main as run_command_line  # noqa: PLC0415
        except KeyboardInterrupt:
            return interrupted()
        return run_command_line()
