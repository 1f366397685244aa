# SPDX-License-Identifier: Apache-2.0
"""The bases of descriptors and plans, and the cache of the function forms."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar, Self

from baracuda import _core
from baracuda.errors import InvalidProblemError
from baracuda.plan import PlanPreference

__all__ = ["Descriptor", "Plan", "cached_plan", "clear_with_plans", "plan_cache_clear", "plan_cache_info"]

_DEFAULT_PREFERENCE = PlanPreference()


class Descriptor:
    """The base of descriptors: frozen, hashable values without handles.

    A subclass is a frozen keyword-only dataclass that names its operator. Its fields are brought to
    one normal form, so that equal problems are equal descriptors.
    """

    operator: ClassVar[str]

    def __init_subclass__(cls, *, operator: str) -> None:
        cls.operator = operator

    def __post_init__(self) -> None:
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}  # type: ignore[arg-type]
        for name, value in _core.normalize(self.operator, fields).items():
            object.__setattr__(self, name, value)


class Plan(_core.PlanCore):
    """One problem, described once and bound to a kernel for one device, run as often as you like.

    A plan is immutable, and any number of threads may run it at once. It is made from the fields of
    its descriptor, or from the descriptor itself by :meth:`select`.

    Args:
        device: ``"cuda"`` (the calling thread's current device), ``"cuda:N"`` or ``"cpu"``.
        preference: what the selection must keep to.
        **fields: the fields of the descriptor.

    Raises:
        InvalidProblemError: the descriptor can't be right.
        UnsupportedError: there is no kernel for it, or none that the preference allows.
        CudaError: the device can't be used.
    """

    Descriptor: ClassVar[type[Any]]
    #: The problem.
    descriptor: Any
    #: What the selection kept to.
    preference: PlanPreference

    def __init__(self, *, device: object = "cuda", preference: PlanPreference | None = None, **fields: Any) -> None:
        try:
            descriptor = self.Descriptor(**fields)
        except TypeError as error:
            # A dataclass names its own __init__; the user called this one.
            sentence = str(error).replace("__init__() ", "").replace(f"{self.Descriptor.__name__}.", "")
            raise TypeError(f"{type(self).__name__}: {sentence}") from None
        self._select(descriptor, device, preference)

    @classmethod
    def select(cls, descriptor: Any, *, device: object = "cuda", preference: PlanPreference | None = None) -> Self:
        """The plan for a descriptor."""
        if not isinstance(descriptor, cls.Descriptor):
            raise InvalidProblemError(
                f"{cls.__name__}: expected a {cls.Descriptor.__name__}, got {type(descriptor).__name__}"
            )
        plan = cls.__new__(cls)
        plan._select(descriptor, device, preference)
        return plan

    def _select(self, descriptor: Any, device: object, preference: PlanPreference | None) -> None:
        if preference is not None and not isinstance(preference, PlanPreference):
            raise InvalidProblemError(
                f"{type(self).__name__}: preference: expected a PlanPreference, got {type(preference).__name__}"
            )
        self.descriptor = descriptor
        self.preference = preference or _DEFAULT_PREFERENCE
        self._create(descriptor.operator, descriptor, str(device), self.preference)

    def __reduce__(self) -> tuple[Any, ...]:
        return _reselect, (type(self), self.descriptor, self.device, self.preference)

    def __repr__(self) -> str:
        return f"{type(self).__name__}.select({self.descriptor!r}, device={self.device!r})"


_core._add_run(Plan)


def _reselect(cls: type[Plan], descriptor: Any, device: str, preference: PlanPreference) -> Plan:
    return cls.select(descriptor, device=device, preference=preference)


@functools.lru_cache(maxsize=1024)
def _cached(cls: type[Plan], device: str, preference: PlanPreference | None, *fields: Any) -> Plan:
    # Names, then values: a flat key is the fastest to hash.
    count = len(fields) // 2
    return cls(device=device, preference=preference, **dict(zip(fields[:count], fields[count:], strict=True)))


def _select_cached(cls: type[Plan], device: str, preference: PlanPreference | None, **fields: Any) -> Plan:
    return _cached(cls, device, preference, *fields, *_core.distinct(tuple(fields.values())))  # type: ignore[arg-type]


_latest = _core.PlanCache(_select_cached)

#: The plan that the function forms share, selected at its first use: of a class, a device, a preference and the
#: fields of the descriptor by name, which must be hashable.
cached_plan: Callable[..., Any] = _latest.find


def plan_cache_info() -> Any:
    """Hits, misses, maximum and current size of the plans that the function forms keep."""
    info = _cached.cache_info()
    return info._replace(hits=info.hits + _latest.hits)


def plan_cache_clear() -> None:
    """Forgets the plans that the function forms keep, and those of the operators of torch and JAX."""
    for clear in clear_with_plans:
        clear()
    _latest.clear()
    _cached.cache_clear()


#: What else is to be forgotten with the plans.
clear_with_plans: list[Callable[[], None]] = []
