"""When does disaggregation pay? Cost versus SLO attainment of every way to serve an LLM to agents.

>>> from breakeven import Study, run          # doctest: +SKIP
>>> run(Study.load("studies/coding-agent.yaml")).front  # doctest: +SKIP
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from breakeven.models.inputs import InputError as InputError
    from breakeven.models.serving import evaluate as evaluate
    from breakeven.studies.result import Result as Result
    from breakeven.studies.run import run as run
    from breakeven.studies.study import Study as Study

_HOMES = {
    "InputError": "breakeven.models.inputs",
    "Result": "breakeven.studies.result",
    "Study": "breakeven.studies.study",
    "evaluate": "breakeven.models.serving",
    "run": "breakeven.studies.run",
}


def __getattr__(name: str) -> Any:
    """Import the public names when they are first used, so that `--help` answers at once."""
    from importlib import import_module

    if name not in _HOMES:
        raise AttributeError(name)
    return getattr(import_module(_HOMES[name]), name)
