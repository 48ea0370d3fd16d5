"""Helpers and contract suites for tests of this project and of its users. No module here imports pytest."""

from ringfence.testing.adapter_contract import AdapterContract
from ringfence.testing.calls import HeldCall, held_call
from ringfence.testing.filesystem_contract import FilesystemContract
from ringfence.testing.part_contracts import PolicyContract, SectionContract

__all__ = ["AdapterContract", "FilesystemContract", "HeldCall", "PolicyContract", "SectionContract", "held_call"]
