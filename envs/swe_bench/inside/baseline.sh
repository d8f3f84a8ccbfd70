# Collects in $STORE/baseline what is needed to tell later what has changed: the manifest that snapshot.sh wrote, the
# tracked paths, and the ignore rules. Reads WORKDIR and STORE.
set -eu
export LC_ALL=C GIT_CONFIG_COUNT=1 GIT_CONFIG_KEY_0=safe.directory GIT_CONFIG_VALUE_0='*'
mkdir -p "$STORE/baseline/rules/.info"
cp "$STORE/manifest" "$STORE/baseline/manifest"
cd "$WORKDIR"
git ls-files -z > "$STORE/baseline/tracked"
if [ -f .git/info/exclude ]; then cp .git/info/exclude "$STORE/baseline/rules/.info/exclude"; fi
find . -name .git -prune -o -name .gitignore -type f -print | while IFS= read -r file; do
  mkdir -p "$STORE/baseline/rules/${file%/*}"
  cp "$file" "$STORE/baseline/rules/$file"
done
