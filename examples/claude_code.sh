#!/bin/sh
# Claude Code as the agent: it writes solution.py in a folder of its own and tries it out; hidden calls grade the file,
# in a sandbox (toy_repos.py). Run it from the repository's root; what follows is handed to train.py:
#
# $ npm install --global @anthropic-ai/claude-code@2.1.197
# $ sh examples/claude_code.sh --model Qwen/Qwen3-4B --steps 100
#
# --bare keeps it small: a first prompt of 3.5 kB instead of 76 kB, with the tools Bash, Edit and Read, and no hooks,
# plugins or CLAUDE.md of yours. CLAUDE_CONFIG_DIR puts what it keeps into the rollout's folder: many of them at once
# would write the same ~/.claude.json. Nobody is there to say yes: edits and Bash are allowed beforehand. Its commands
# run as you, with your files and your network, so run the training in a container. --max_turns ends it, and counts
# it as truncated; its own --max-turns would end it with an error. Other agents go the same way: opencode run, …
set -e
python examples/toy_repos.py write 2000 > write.jsonl
exec python train.py --data write.jsonl --reward examples/toy_repos.py \
    --agent_cmd 'env CLAUDE_CONFIG_DIR=.claude_code DISABLE_AUTOUPDATER=1
        claude -p {prompt} --bare --permission-mode acceptEdits --allowedTools Bash --no-session-persistence' \
    --max_turns 16 --max_tokens 2048 --max_context 16384 "$@"
