#!/bin/sh
# Does nothing: whether there can be a guest at all.
. "${0%/*}/prelude.sh"
finish
