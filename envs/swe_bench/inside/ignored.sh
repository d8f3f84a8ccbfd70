# Writes to $RULES.ignored which paths of $RULES.asked the ignore rules in $RULES leave out.
set -u
export LC_ALL=C GIT_CONFIG_NOSYSTEM=1 GIT_CONFIG_GLOBAL=/dev/null HOME=/nonexistent
unset GIT_DIR GIT_WORK_TREE GIT_INDEX_FILE GIT_CONFIG_PARAMETERS 2>/dev/null || true
git init --quiet --template= "$RULES" || exit 9
cd "$RULES" || exit 9
mkdir -p .git/info
cat .info/exclude > .git/info/exclude 2>/dev/null
git -c safe.directory='*' -c core.excludesFile="$RULES.generated" check-ignore --no-index -z --stdin \
  < "$RULES.asked" > "$RULES.ignored"
