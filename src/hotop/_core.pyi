"""The C++ core's surface."""

from collections.abc import Callable
from typing import Any

TORCH_VERSION: str

class CallSlot:
    """Base of everything that the C++ routine calls."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any: ...

class Plan:
    """A schema flattened once, and the kernels that may be called directly."""

    def __new__(
        cls, name: str, overload_name: str, obligation: str, check_result: Callable[..., None], /
    ) -> Plan: ...
    @property
    def direct_calls(self) -> int: ...
    def add_kernel(
        self,
        role: str,
        dispatch_key: str,
        function: Callable[..., Any] | None,
        device_type: str | None,
        /,
    ) -> None: ...
    def set_function(self, device_type: str | None, function: Callable[..., Any], /) -> None: ...
    def retire(self) -> None: ...

def bind(slot: CallSlot, plan: Plan | None, slow: Callable[..., Any], /) -> None: ...
def point_calls(cls: type[CallSlot], /) -> None: ...
def shorten_lookups(cls: type, /) -> None: ...
def explain(slot: CallSlot, args: tuple[Any, ...], kwargs: dict[str, Any], /) -> str | None: ...
def guarded_autograd_kernel(
    make: Callable[[], Callable[..., Any]], refuse: Callable[[], None], mutates: bool, /
) -> Callable[..., Any]: ...
