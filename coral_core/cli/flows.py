"""`coral flows`: the same work through Prefect."""

from __future__ import annotations

from typing import Annotated

from cyclopts import App, Parameter

from coral_core.errors import InputError

app = App(name="flows", help="Prefect: serve the deployments.")


@app.command
def serve(
    *,
    limit: Annotated[int, Parameter(help="Flow runs at once.")] = 2,
) -> None:
    """Serve the deployments (build-library, reallocate, evaluate) to the server at PREFECT_API_URL, until stopped."""
    try:
        from flows.deployments import serve_all
    except ModuleNotFoundError as error:
        raise flows_extra_missing(error) from None
    serve_all(limit=limit)


def flows_extra_missing(error: ModuleNotFoundError) -> InputError:
    """The error for a base install that is asked for Prefect or Ray."""
    return InputError(f"{error.name} is not installed", where="environment", fix="pip install 'coral-serve[flows]'")
