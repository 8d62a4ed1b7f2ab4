#!/bin/sh
# Audits one example, honest and with every planted fault: check.sh FEDSWEEP PYTHON EXAMPLE [OPTIONS]
set -u
fedsweep=$1 python=$2 example=$3
shift 3
for fault in none divisor steps clip-after-mean; do
  expected=1
  [ $fault = none ] && expected=0
  "$fedsweep" audit --program "$python $example --fault $fault" --epsilon 2 --data synthetic-frozen:1000,50,10,3 "$@"
  found=$?
  echo "$example, fault $fault: exit code $found"
  [ $found -eq $expected ] || { echo "expected $expected"; exit 1; }
done
