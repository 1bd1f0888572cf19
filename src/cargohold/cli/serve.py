"""``cargohold serve`` and ``dashboard``: a model behind known interfaces with a page, and the page for engines elsewhere."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Annotated, Any

import typer

from cargohold.cli.app import EXIT_USAGE, app
from cargohold.cli.common import EngineOptions, ModelArgument, loading, remark, takes_groups
from cargohold.option_values import parse_bytes

_PACKAGES = ("fastapi", "uvicorn", "prometheus_client")


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """Where the server listens, for whom, and how much it takes on; see ``ServeConfig``."""

    host: Annotated[str, typer.Option(help="The address to listen at; 0.0.0.0 lets other machines in.")] = "127.0.0.1"
    port: Annotated[int, typer.Option(help="The port to listen at; 0 takes any free one.")] = 8000
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            help="Let only clients with a key in; may be given several times: each is a tenant with a cache of its own.",
            envvar="CARGOHOLD_API_KEYS",
            show_envvar=True,
        ),
    ] = None
    tenants: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help='Let in tenants with shares of host memory: JSON such as {"acme": {"key": "...", "hard": "2GiB"}}.',
        ),
    ] = None
    admin_key: Annotated[
        str | None,
        typer.Option(
            help="This key sees all tenants' requests, and may reset the cache.",
            envvar="CARGOHOLD_ADMIN_KEY",
            show_envvar=True,
        ),
    ] = None
    served_model_name: Annotated[
        list[str] | None, typer.Option(help="What clients call the model; may be given several times.", metavar="NAME")
    ] = None
    max_queue: Annotated[int, typer.Option(help="Requests that may wait; more are told to come again.")] = 256
    max_body_bytes: Annotated[str, typer.Option(help="Largest body of a request.")] = "8MiB"

    def config(self) -> Any:
        """The options as the server takes them. Raises ``ConfigError`` for impossible ones."""
        from cargohold.serve.settings import ServeConfig, Tenant  # noqa: PLC0415  # needs packages that may be absent

        return ServeConfig(
            host=self.host,
            port=self.port,
            api_keys=tuple(self.api_key or ()),
            tenants=() if self.tenants is None else Tenant.read(self.tenants),
            admin_key=self.admin_key,
            served_names=tuple(self.served_model_name or ()),
            max_queue=self.max_queue,
            max_body_bytes=parse_bytes("max_body_bytes", self.max_body_bytes),
        )


@app.command()
@takes_groups
def serve(
    model: ModelArgument,
    server: ServeOptions = ServeOptions(),
    engine: EngineOptions = EngineOptions(host_bytes="1GiB"),  # noqa: B008  # frozen
) -> None:
    """Serve a model to clients of OpenAI's and Anthropic's interfaces, with a page that shows the cache.

    Ctrl-C and SIGTERM end it: it takes no more requests, and gives those that it has some seconds to end.
    """
    _check_packages("serve")
    from cargohold.llm import AsyncLLM  # noqa: PLC0415  # slow to import
    from cargohold.serve.server import serving  # noqa: PLC0415  # needs packages that may be absent
    from cargohold.serve.settings import with_shares  # noqa: PLC0415  # as above

    config, options = server.config(), engine.llm_options()
    options["offload"] = with_shares(options["offload"], config)
    with serving(config) as running:
        with loading(model):
            llm = AsyncLLM(model, **options)
        running.open(llm)
        remark(f"serving {model} at {running.url} (a page for people), {running.url}/v1 (for clients)", style="")
        running.wait()


@app.command()
def dashboard(
    urls: Annotated[list[str], typer.Argument(help="Addresses of engines, such as localhost:8000.", metavar="URL...")],
    host: Annotated[str, typer.Option(help="The address to listen at; 0.0.0.0 lets other machines in.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="The port to listen at; 0 takes any free one.")] = 8080,
    interval: Annotated[float, typer.Option(help="Seconds between two looks at an engine.", min=0.5)] = 2.0,
) -> None:
    """Show the page for engines that run elsewhere: cargohold serve, or vLLM with the connector. Ctrl-C ends it."""
    _check_packages("dashboard")
    from cargohold.serve.dashboard import Engine, serve_dashboard  # noqa: PLC0415  # needs packages that may be absent
    from cargohold.serve.records import metrics_url  # noqa: PLC0415  # as above
    from cargohold.serve.settings import ServeConfig  # noqa: PLC0415  # as above

    engines = [Engine(url, metrics_url(url)) for url in urls]
    config = ServeConfig(host=host, port=port)
    serve_dashboard(engines, config, interval, lambda address: remark(f"a page for people at {address}", style=""))


def _check_packages(command: str) -> None:
    """End with words where a package of the server's is absent."""
    for package in _PACKAGES:
        if find_spec(package) is None:
            install = "pip install 'cargohold[serve]'"
            typer.echo(f"cargohold {command}: the package {package} is not installed here: {install}", err=True)
            raise typer.Exit(EXIT_USAGE)
