# Brings a repository to its base commit and gives it a history that ends there.
# Reads WORKDIR and BASE. Exit codes: 40 no repository, 41 no such commit, 42 no checkout, 43 history not clean.
set -eu
export GIT_NO_REPLACE_OBJECTS=1 GIT_CONFIG_COUNT=1 GIT_CONFIG_KEY_0=safe.directory GIT_CONFIG_VALUE_0='*' LC_ALL=C
unset GIT_DIR GIT_WORK_TREE GIT_INDEX_FILE 2>/dev/null || true
cd "$WORKDIR" || exit 40
common=$(git rev-parse --git-common-dir 2>/dev/null) || exit 40
common=$(cd "$common" && pwd -P)
base=$(git rev-parse --verify --quiet "$BASE^{commit}") || exit 41
git cat-file -e "$base^{tree}" 2>/dev/null || exit 41
head=$(git rev-parse --verify --quiet HEAD || true)
branch=main
if [ "$head" = "$base" ]; then
  branch=$(git symbolic-ref --short --quiet HEAD || echo main)
elif [ "$(git rev-parse --verify --quiet HEAD^ || true)" = "$base" ] && [ "$(git log -1 --format=%s)" = SWE-bench ]; then
  : # the image's own commit of its set-up: that stays, as changes of the work tree
else
  git -c core.hooksPath=/dev/null checkout --quiet --force --detach "$base" >&2 || exit 42
fi

new=$(mktemp -d /var/tmp/.git-XXXXXXXX)
git init --quiet --bare --template= "$new"
mkdir -p "$new/info" "$new/refs/tags"
# Tags of the past stay (versions are read from them); one that was made after the base commit is of the future.
when=$(git log -1 --format=%ct "$base")
git for-each-ref --merged="$base" --format='%(creatordate:unix) %(objectname) %(refname)' refs/tags |
  while read -r made object name; do
    if [ -n "$made" ] && [ "$made" -le "$when" ] 2>/dev/null; then echo "$object $name"; fi
  done > "$new/tags"
{ echo "$base"; cut -d' ' -f1 "$new/tags"; } > "$new/tips"
if [ -s "$common/shallow" ]; then
  git rev-list "$base" > "$new/ancestors"
  grep -F -x -f "$new/ancestors" "$common/shallow" > "$new/shallow" || rm -f "$new/shallow"
  rm -f "$new/ancestors"
fi
git pack-objects --revs --quiet "$new/objects/pack/pack" < "$new/tips" > /dev/null
git rev-list --objects --no-object-names $(cat "$new/tips") > "$new/reachable"
git --git-dir="$new" rev-parse --verify --quiet "$base^{tree}" > /dev/null || exit 43
for key in core.filemode core.symlinks core.ignorecase core.autocrlf core.eol core.safecrlf; do
  if value=$(git config --local --get "$key"); then git --git-dir="$new" config "$key" "$value"; fi
done
# Whoever works here may commit.
git --git-dir="$new" config user.name agent
git --git-dir="$new" config user.email agent@localhost
if [ -f "$common/info/exclude" ]; then cp "$common/info/exclude" "$new/info/exclude"; fi
if [ -f "$common/info/attributes" ]; then cp "$common/info/attributes" "$new/info/attributes"; fi

# Other places of the same history: work trees, borrowed object stores, repositories inside this one.
here=$(pwd -P)
git worktree list --porcelain | sed -n 's/^worktree //p' | while read -r tree; do
  tree=$(cd "$tree" 2>/dev/null && pwd -P) || continue
  case "$here/" in "$tree"/*) ;; *) rm -rf "$tree" ;; esac
done
for list in "$common/objects/info/alternates"; do
  [ -f "$list" ] || continue
  while read -r store; do
    case "$store" in ''|'#'*) continue ;; /*) ;; *) store="$common/objects/$store" ;; esac
    store=$(cd "$store" 2>/dev/null && pwd -P) || continue
    holder=${store%/objects}
    if [ -f "$holder/HEAD" ] && [ "$holder" != "$common" ]; then rm -rf "$holder"; else rm -rf "$store"; fi
  done < "$list"
done
find "$here" -mindepth 1 -name .git -prune -exec rm -rf {} +
case "$common" in "$here"/*) ;; *) rm -rf "$common" ;; esac

git --git-dir="$new" update-ref --no-deref "refs/heads/$branch" "$base"
git --git-dir="$new" symbolic-ref HEAD "refs/heads/$branch"
while read -r object name; do git --git-dir="$new" update-ref "$name" "$object"; done < "$new/tags"
git --git-dir="$new" config core.bare false
git --git-dir="$new" config --unset core.worktree 2>/dev/null || true
sort -u "$new/reachable" > "$new/reachable.sorted"
git --git-dir="$new" cat-file --batch-all-objects --batch-check='%(objectname)' | sort -u > "$new/present"
comm -13 "$new/reachable.sorted" "$new/present" > "$new/extra"
# A tag's own object is reachable from its name only.
cut -d' ' -f1 "$new/tags" | sort -u | comm -13 - "$new/extra" > "$new/unexplained"
if [ -s "$new/unexplained" ]; then exit 43; fi
rm -rf "$new/tags" "$new/tips" "$new/reachable" "$new/reachable.sorted" "$new/present" "$new/extra" \
  "$new/unexplained" "$new/logs" "$new/description" "$new/branches" "$new/hooks"
mv "$new" "$here/.git"
chown -R "$(stat -c %u:%g "$here")" "$here/.git" 2>/dev/null || true
git read-tree "$base"
git update-index -q --refresh > /dev/null || true
git rev-parse HEAD
