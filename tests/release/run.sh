#!/usr/bin/env bash
# Builds a release from a clean clone of what is committed, checks it, and tries it with every Python
# that is here. The sources and the wheel, with their checksums, are then in target/release-files.
set -euo pipefail
cd "$(dirname "$0")/../.."
root=$PWD work=$PWD/target/release-work files=$PWD/target/release-files
requirements=tests/release/requirements.txt

[ -z "$(git status --porcelain)" ] || { echo "there are changes that are not committed: commit or remove them"; exit 1; }
version=$(sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -1)
grep -q "^## $version" CHANGELOG.md || { echo "CHANGELOG.md has no section $version"; exit 1; }

rm -rf "$work" "$files"
mkdir -p "$work" "$files"
"${PYTHON:-python3}" -m venv "$work/tools"
"$work/tools/bin/python" -m pip install --quiet --disable-pip-version-check -r "$requirements"
PATH=$work/tools/bin:$PATH
cargo_home=${CARGO_HOME:-$HOME/.cargo}
# Files in the wheel have the time of the commit.
SOURCE_DATE_EPOCH=$(git log -1 --format=%ct)
export SOURCE_DATE_EPOCH VIRTUAL_ENV=$work/tools

# Builds the wheel of the sources in $1 into $2. zig links against a glibc that is old enough for
# manylinux2014. No path of this machine remains in the wheel.
build_wheel() {
    RUSTFLAGS="--remap-path-prefix=$1=stepwell --remap-path-prefix=$cargo_home=cargo" CARGO_TARGET_DIR=$work/target-$2 \
        maturin build --quiet --release --strip --locked --zig --compatibility manylinux2014 \
        --out "$work/$2" --manifest-path "$1/python/Cargo.toml"
}

echo "== the wheel, from a clean clone"
git clone --quiet "$root" "$work/clone"
"$work/tools/bin/python" tests/release/licences.py "$work/clone" "$work/clone/python/LICENSES-OF-OTHERS"
build_wheel "$work/clone" wheel
wheel=$(ls "$work"/wheel/*.whl)
maturin sdist --out "$files" --manifest-path "$work/clone/python/Cargo.toml"

echo "== the same wheel, from the released sources"
mkdir "$work/sources"
tar -xzf "$files"/stepwell-"$version".tar.gz -C "$work/sources" --strip-components=1
build_wheel "$work/sources" again
cmp "$wheel" "$work/again/$(basename "$wheel")" || { echo "the two wheels differ: the build is not reproducible"; exit 1; }
cp "$wheel" "$files"

echo "== platform, stable ABI, licences"
auditwheel show "$wheel"
abi3audit --strict --summary "$wheel"
# grep counts: with -q it would end early, and pipefail would take unzip's SIGPIPE for "not found".
for file in LICENSE LICENSES-OF-OTHERS; do
    [ "$(unzip -l "$wheel" | grep -c "dist-info/licenses/$file\$")" = 1 ] || { echo "the wheel has no $file"; exit 1; }
done
[ "$(unzip -p "$wheel" | grep -acF -e "$cargo_home" -e "$root")" = 0 ] || { echo "the wheel has paths of this machine"; exit 1; }
cargo deny --log-level error check licenses bans sources

echo "== aarch64"
tests/release/aarch64.sh "$work/clone" "$work/aarch64"
if [ -e "$work/aarch64/tried" ]; then cp "$work"/aarch64/wheel/*.whl "$files"; fi

# The first one also trains with PyTorch, JAX and the Hugging Face Trainer.
tried= frameworks="torch jax transformers"
for python in $(compgen -c python3. | sort -u) "${PYENV_ROOT:-$HOME/.pyenv}"/versions/*/bin/python3; do
    number=$("$python" -c 'import sys, venv, ensurepip; assert sys.version_info >= (3, 11); print("%d.%d" % sys.version_info[:2])' 2>/dev/null) || continue
    case " $tried " in *" $number "*) continue ;; esac
    echo "== Python $number"
    mkdir "$work/$number"
    # shellcheck disable=SC2086
    "$python" tests/newcomer/try.py "$wheel" "$work/$number" $frameworks
    tried="$tried $number" frameworks=
done
[ -n "$tried" ] || { echo "no Python was found to try it with"; exit 1; }

rm -rf "$work"
echo "== $version, tried with Python$tried"
(cd "$files" && sha256sum -- * | tee SHA256SUMS)
