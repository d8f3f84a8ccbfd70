# Lists the files of a work tree byte by byte as they are: no filter, line ending, ignore rule or nested repository
# of the tree has a say. Reads WORKDIR and STORE (a folder to make); writes $STORE/manifest.
set -eu
export LC_ALL=C GIT_CONFIG_NOSYSTEM=1 GIT_CONFIG_GLOBAL=/dev/null HOME=/nonexistent
unset GIT_WORK_TREE GIT_INDEX_FILE GIT_OBJECT_DIRECTORY GIT_CONFIG_PARAMETERS 2>/dev/null || true
git init --quiet --bare --template= "$STORE"
mkdir -p "$STORE/info"
echo '* -text -eol -ident -crlf !filter !diff !merge !working-tree-encoding' > "$STORE/info/attributes"
for pair in core.bare=false core.fileMode=true core.symlinks=true core.autocrlf=false core.safecrlf=false \
  core.protectNTFS=false core.protectHFS=false core.hooksPath=/dev/null core.attributesFile=/dev/null \
  core.excludesFile=/dev/null core.fsmonitor=false core.ignoreCase=false core.compression=1 gc.auto=0; do
  git config --file "$STORE/config" "${pair%%=*}" "${pair#*=}"
done
cd "$WORKDIR"
export GIT_DIR="$STORE" GIT_WORK_TREE="$WORKDIR"
find . -name .git -prune -o \( -type l -o -type f -size -204800 \) -print0 |
  git update-index --add --remove --info-only -z --stdin
git ls-files -s -z > "$STORE/manifest"
