"""Prepares torchvision before any test module imports open_clip, timm or
transformers, which import it.
"""

import asyncio
import inspect

from edje_index.models._torchvision_compat import prepare_torchvision

prepare_torchvision()


def pytest_pyfunc_call(pyfuncitem):
    """Run the asynchronous tests of LangChain."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True
