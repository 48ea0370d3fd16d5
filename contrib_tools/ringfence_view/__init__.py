"""A page that shows the calls of a workspace or a run: what each did, what was rolled back, and what came of it."""

from typing import TYPE_CHECKING

from ringfence.lazy_names import lazy_names

if TYPE_CHECKING:
    from ringfence_view.app import serve_view, view_app
    from ringfence_view.batch_server import batch_app
    from ringfence_view.batch_source import BatchSource, is_batch
    from ringfence_view.pages import export_page
    from ringfence_view.sources import CallSource

__all__ = [
    "BatchSource",
    "CallSource",
    "batch_app",
    "export_page",
    "is_batch",
    "serve_view",
    "view_app",
]

# Imported when asked for: an export needs no server.
_MODULES = {
    "BatchSource": ".batch_source",
    "CallSource": ".sources",
    "batch_app": ".batch_server",
    "export_page": ".pages",
    "is_batch": ".batch_source",
    "serve_view": ".app",
    "view_app": ".app",
}

__getattr__, __dir__ = lazy_names(__name__, _MODULES)
