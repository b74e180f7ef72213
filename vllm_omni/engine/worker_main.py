"""What runs in a worker process of an AR stage: upstream's worker, with typed exceptions."""

from __future__ import annotations

import traceback
from typing import Any, NoReturn

from vllm.v1.executor.multiproc_executor import WorkerProc
from vllm_omni.engine.process_exit import leave
from vllm_omni.health import seams

_upstream_worker_main = WorkerProc.worker_main


def worker_main(*args: Any, **kwargs: Any) -> NoReturn:
    """Process target in place of upstream's: the same worker, our seams, a quick end."""
    status = 1
    try:
        seams.install_worker()
        _upstream_worker_main(*args, **kwargs)
        status = 0
    except SystemExit as exc:
        status = exc.code if isinstance(exc.code, int) else 0 if exc.code is None else 1
    except BaseException:
        traceback.print_exc()
    leave(status)
