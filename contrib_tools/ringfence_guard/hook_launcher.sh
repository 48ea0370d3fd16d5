# Written by `ringfence guard install`. Runs the client of a hook with the interpreter that ringfence has now.
# usage: PYTHON CLIENT COMMAND WORDS...: where they were at the installation, and what the client gets.
python=$1 client=$2 command=$3
shift 3
if ! [ -x "$python" ] && [ -r "$command" ]; then
    { IFS= read -r first; IFS= read -r second; } <"$command"
    case $first in
    '#!/bin/sh') second=${second#*\"} python=${second%%\"*} ;; # a path that is too long for the first line
    *) python=${first#??} ;;
    esac
fi
if ! [ -r "$client" ]; then
    for client in "${python%/bin/*}"/lib/python3*/site-packages/ringfence_guard/hook_client.py; do :; done
fi
if [ -x "$python" ] && [ -r "$client" ]; then
    exec "$python" -I -S "$client" "$@"
fi
event=$(cat)
case " $* " in *' --if-unavailable allow '*) exit 0 ;; esac
case $event in
*'"PreToolUse"'* | *'"BeforeTool"'* | *'"tool.execute.before"'*)
    echo "ringfence guard is not installed any more, so this call must not run: run \`ringfence guard install\` again." >&2
    exit 2
    ;;
esac
