"""Names of the GenAI semantic conventions, and our own.

Constants of our own, since the conventions are in development and the package that has them breaks between versions.
"""

from __future__ import annotations

OPERATION_NAME = "gen_ai.operation.name"
PROVIDER_NAME = "gen_ai.provider.name"
AGENT_NAME = "gen_ai.agent.name"
CONVERSATION_ID = "gen_ai.conversation.id"
REQUEST_MODEL = "gen_ai.request.model"
FINISH_REASONS = "gen_ai.response.finish_reasons"
INPUT_TOKENS = "gen_ai.usage.input_tokens"
OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
CACHED_TOKENS = "gen_ai.usage.cache_read.input_tokens"
TOKEN_TYPE = "gen_ai.token.type"  # noqa: S105
OUTPUT_MESSAGES = "gen_ai.output.messages"
TOOL_NAME = "gen_ai.tool.name"
TOOL_TYPE = "gen_ai.tool.type"
TOOL_DESCRIPTION = "gen_ai.tool.description"
TOOL_CALL_ID = "gen_ai.tool.call.id"
TOOL_ARGUMENTS = "gen_ai.tool.call.arguments"
TOOL_RESULT = "gen_ai.tool.call.result"
ERROR_TYPE = "error.type"
EXIT_CODE = "process.exit.code"

TOOL_DURATION = "gen_ai.execute_tool.duration"
OPERATION_DURATION = "gen_ai.client.operation.duration"
TOKEN_USAGE = "gen_ai.client.token.usage"  # noqa: S105

CAPTURE_VARIABLE = "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"

OUTCOME = "ringfence.outcome"
RECEIPT = "ringfence.receipt.id"
COMMIT = "ringfence.commit.id"
DENIED_BY = "ringfence.policy.denied_by"
FILES_READ = "ringfence.files.read"
FILES_CHANGED = "ringfence.files.changed"
CONFLICTS = "ringfence.files.conflicts"
BYTES_BEFORE = "ringfence.diff.bytes_before"
BYTES_AFTER = "ringfence.diff.bytes_after"
RUN = "ringfence.run.id"

OTHER = "_OTHER"
"""In the place of a name that a model has made up."""
SECONDS = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
"""Boundaries of the histograms of durations."""
TOKENS = tuple(4**power for power in range(14))
