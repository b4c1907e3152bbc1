"""Prepares torchvision before any test module imports open_clip, timm or
transformers, which import it.
"""

import asyncio
import inspect

import pytest

from edje_index.models._torchvision_compat import prepare_torchvision

prepare_torchvision()


@pytest.fixture(scope="session", autouse=True)
def one_vocabulary():
    """Read the vocabulary of open_clip once: that takes half the time of opening a tiny
    model, and each opens it again.
    """
    from open_clip.tokenizer import SimpleTokenizer

    begin = SimpleTokenizer.__init__
    made = {}

    def begin_once(self, **options):
        key = repr(options)
        if key not in made:
            begin(self, **options)
            made[key] = dict(vars(self))
        vars(self).update(made[key])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SimpleTokenizer, "__init__", begin_once)
        yield


def pytest_pyfunc_call(pyfuncitem):
    """Run the asynchronous tests of LangChain."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True
