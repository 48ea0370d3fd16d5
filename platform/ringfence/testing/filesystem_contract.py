"""The contract suite of filesystems: tests that a backend inherits."""

from __future__ import annotations

from ringfence.testing.files_contract import FilesContract
from ringfence.testing.history_contract import HistoryContract
from ringfence.testing.links_contract import LinksContract
from ringfence.testing.paths_contract import PathsContract
from ringfence.testing.search_contract import SearchContract


class FilesystemContract(PathsContract, FilesContract, LinksContract, SearchContract, HistoryContract):
    """The whole contract. A test class inherits it and gives two fixtures:

    - ``fs``: a new, empty filesystem that takes part in tool calls;
    - ``read_only_fs``: another one, read-only, in which ``a.txt`` has the text "a" and a newline.

    Where a backend cannot hold something, the attributes of `FilesystemAbilities` say so. Assertions are readable
    after ``pytest.register_assert_rewrite("ringfence.testing")`` in a conftest.py.
    """
