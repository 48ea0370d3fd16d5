"""Guard the tools that an agent already has: each changing call is a step, and what a policy denies is rolled back."""

from typing import TYPE_CHECKING

from ringfence.lazy_names import lazy_names

if TYPE_CHECKING:
    from ringfence_guard.agents import GUARDED_AGENTS, GuardedAgent, HookCommand
    from ringfence_guard.answers import HookAnswer, HookOutput, can_take_context, format_answer
    from ringfence_guard.calls import GuardedCalls
    from ringfence_guard.codex_trust import CodexHook, CodexTrust
    from ringfence_guard.connection import (
        GuardRefusedError,
        ask_guard,
        check_person,
        guarded_root,
        person_writes,
        stop_guard,
    )
    from ringfence_guard.events import AgentName, HookEvent, Phase, parse_event
    from ringfence_guard.guard_log import GuardedCallRecord, GuardLog
    from ringfence_guard.guarded_workspace import open_guarded
    from ringfence_guard.installation import HookInstallation, cache_around
    from ringfence_guard.judging import unreadable_policies
    from ringfence_guard.left_processes import AGENT_MARKS, may_be_left, may_live
    from ringfence_guard.own_files import OwnFilesPolicy
    from ringfence_guard.settings import (
        GuardSettings,
        client_path,
        guard_directory,
        load_settings,
        save_launcher,
        save_settings,
        scoped_settings,
    )
    from ringfence_guard.wording import list_paths

__all__ = [
    "AGENT_MARKS",
    "GUARDED_AGENTS",
    "AgentName",
    "CodexHook",
    "CodexTrust",
    "GuardLog",
    "GuardRefusedError",
    "GuardSettings",
    "GuardedAgent",
    "GuardedCallRecord",
    "GuardedCalls",
    "HookAnswer",
    "HookCommand",
    "HookEvent",
    "HookInstallation",
    "HookOutput",
    "OwnFilesPolicy",
    "Phase",
    "ask_guard",
    "cache_around",
    "can_take_context",
    "check_person",
    "client_path",
    "format_answer",
    "guard_directory",
    "guarded_root",
    "list_paths",
    "load_settings",
    "may_be_left",
    "may_live",
    "open_guarded",
    "parse_event",
    "person_writes",
    "save_launcher",
    "save_settings",
    "scoped_settings",
    "stop_guard",
    "unreadable_policies",
]

# Imported when asked for: an event is read without a workspace.
_MODULES = {
    "AGENT_MARKS": ".left_processes",
    "GUARDED_AGENTS": ".agents",
    "AgentName": ".events",
    "CodexHook": ".codex_trust",
    "CodexTrust": ".codex_trust",
    "GuardLog": ".guard_log",
    "GuardRefusedError": ".connection",
    "GuardSettings": ".settings",
    "GuardedAgent": ".agents",
    "GuardedCallRecord": ".guard_log",
    "GuardedCalls": ".calls",
    "HookAnswer": ".answers",
    "HookCommand": ".agents",
    "HookEvent": ".events",
    "HookInstallation": ".installation",
    "HookOutput": ".answers",
    "OwnFilesPolicy": ".own_files",
    "Phase": ".events",
    "ask_guard": ".connection",
    "cache_around": ".installation",
    "can_take_context": ".answers",
    "check_person": ".connection",
    "client_path": ".settings",
    "format_answer": ".answers",
    "guard_directory": ".settings",
    "guarded_root": ".connection",
    "list_paths": ".wording",
    "load_settings": ".settings",
    "may_be_left": ".left_processes",
    "may_live": ".left_processes",
    "open_guarded": ".guarded_workspace",
    "parse_event": ".events",
    "person_writes": ".connection",
    "save_launcher": ".settings",
    "save_settings": ".settings",
    "scoped_settings": ".settings",
    "stop_guard": ".connection",
    "unreadable_policies": ".judging",
}

__getattr__, __dir__ = lazy_names(__name__, _MODULES)
