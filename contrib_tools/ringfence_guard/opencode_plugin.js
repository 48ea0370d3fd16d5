// Written by `ringfence guard install opencode`; `ringfence guard uninstall opencode` removes it.
import { spawn } from "node:child_process"

const COMMAND = __COMMAND__
// They change no file.
const UNGUARDED = new Set([
  "codesearch", "glob", "grep", "list", "lsp", "question", "read", "skill", "task", "todoread", "todowrite",
  "webfetch", "websearch",
])

// By the session of a sub-agent, the one that it works for.
const PARENTS = new Map()

function ask(event) {
  event.parent_session_id = PARENTS.get(event.sessionID)
  return new Promise((resolve) => {
    const child = spawn(COMMAND[0], COMMAND.slice(1), { stdio: ["pipe", "pipe", "pipe"] })
    let stdout = "", stderr = ""
    child.stdout.on("data", (part) => (stdout += part))
    child.stderr.on("data", (part) => (stderr += part))
    child.stdin.on("error", () => {})
    child.on("error", (error) => resolve({ error: `ringfence guard cannot be asked: ${error.message}` }))
    child.on("close", (code) => {
      if (code !== 0) return resolve({ error: stderr || `ringfence guard ended with code ${code}` })
      try {
        resolve(stdout ? JSON.parse(stdout) : {})
      } catch (error) {
        resolve({ error: `ringfence guard answered nonsense: ${error.message}` })
      }
    })
    child.stdin.end(JSON.stringify(event))
  })
}

export const RingfenceGuard = async ({ directory }) => ({
  "tool.execute.before": async (input, output) => {
    if (UNGUARDED.has(input.tool)) return
    const answer = await ask({ ...input, hook_event_name: "tool.execute.before", cwd: directory, args: output.args })
    if (answer.error || answer.deny) throw new Error(answer.error || answer.deny)
  },
  "tool.execute.after": async (input, output) => {
    if (UNGUARDED.has(input.tool)) return
    const result = { metadata: { exit: output.metadata?.exit } }
    const answer = await ask({ ...input, hook_event_name: "tool.execute.after", cwd: directory, output: result })
    if (answer.replace) output.output = answer.replace
    else if (answer.append || answer.error) output.output = `${output.output}\n\n${answer.append || answer.error}`
  },
  event: async ({ event }) => {
    if (event.type === "session.created" && event.properties.info?.parentID)
      PARENTS.set(event.properties.info.id, event.properties.info.parentID)
    if (event.type !== "session.idle") return
    await ask({ hook_event_name: event.type, cwd: directory, sessionID: event.properties.sessionID })
  },
})
