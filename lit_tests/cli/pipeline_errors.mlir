// Pipelines that say nothing, each refused before the input is read: it is not even there.
// DEFINE: %{refused} = python %{inputs}/expect_refusal.py --absent %t.mlir stablehlo-tools opt /nonexistent -o %t.mlir -p

// Names.
// RUN: %{refused} 'thread-token' | filecheck %s --check-prefix=CLOSE
// CLOSE: stablehlo-tools: error: unknown pass 'thread-token': neither in this toolkit nor registered in MLIR; did you mean 'thread-tokens'?

// RUN: %{refused} 'cse,order-collectivs' | filecheck %s --check-prefix=NAMED
// NAMED: error: unknown pass 'order-collectivs'{{.*}}did you mean 'order-collectives'?
// NAMED-NEXT: try: stablehlo-tools opt {{.*}} cse,order-collectives

// RUN: %{refused} 'frobnicate' | filecheck %s --check-prefix=UNKNOWN
// UNKNOWN: error: unknown pass 'frobnicate'{{.*}}; passes here: {{.*}}partition, create-reduce-scatter
// UNKNOWN-NEXT: try: stablehlo-tools opt --list-passes

// Options.
// RUN: %{refused} 'thread-tokens{from=barrier}' | filecheck %s --check-prefix=OPTION
// OPTION: error: pass 'thread-tokens' has no option 'from'; did you mean 'form'? it has: form, scope, minimal
// OPTION-NEXT: try: stablehlo-tools opt {{.*}} 'thread-tokens{form=barrier}'

// RUN: %{refused} 'strip-tokens{minimal}' | filecheck %s --check-prefix=NOOPTION
// NOOPTION: error: pass 'strip-tokens' has no option 'minimal'; it has: none

// RUN: %{refused} 'thread-tokens{form=tower}' | filecheck %s --check-prefix=CHOICE
// CHOICE: error: pass 'thread-tokens': option 'form' must be barrier or composite, not 'tower'

// A schedule that takes a program for each rank.
// RUN: %{refused} 'expand-pipeline{schedule=zb-h1}' | filecheck %s --check-prefix=SCHEDULE
// SCHEDULE: error: pass 'expand-pipeline': option 'schedule' must be gpipe or circular or 1f1b or eager-1f1b, not 'zb-h1'; expand-mpmd runs zb-h1, with a program for each rank
// SCHEDULE-NEXT: try: stablehlo-tools expand-mpmd /nonexistent -o ranks --schedule zb-h1 --pipeline-axis stage --microbatches 8

// RUN: %{refused} 'expand-pipeline{schedule=1F1B}' | filecheck %s --check-prefix=CAPITALS
// CAPITALS: error: {{.*}}, not '1F1B'; did you mean '1f1b'?

// RUN: %{refused} 'expand-pipeline{microbatches=four}' | filecheck %s --check-prefix=FOUR
// FOUR: error: {{.*}}option 'microbatches' must be a whole number, not 'four'
// FOUR-NEXT: try: stablehlo-tools opt --help expand-pipeline

// RUN: %{refused} 'expand-pipeline{microbatches=4, schedule=1f1b}' | filecheck %s --check-prefix=SPACED
// SPACED: error: {{.*}}option 'microbatches' must be a whole number, not '4,'; spaces separate options, not commas
// SPACED-NEXT: try: stablehlo-tools opt --help expand-pipeline

// RUN: %{refused} 'thread-tokens{minimal=maybe}' | filecheck %s --check-prefix=BOOLEAN
// BOOLEAN: error: pass 'thread-tokens': option 'minimal' must be true or false, not 'maybe'
// BOOLEAN-NEXT: try: stablehlo-tools opt --help thread-tokens

// RUN: %{refused} 'thread-tokens{form}' | filecheck %s --check-prefix=VALUE
// VALUE: error: pass 'thread-tokens': option 'form' needs a value

// RUN: %{refused} 'thread-tokens{scope=all form=barrier scope=all}' | filecheck %s --check-prefix=TWICE
// TWICE: error: pass 'thread-tokens': option 'scope' is given twice

// RUN: %{refused} 'order-collectives{minimal}' | filecheck %s --check-prefix=PIPELINE
// PIPELINE: error: pipeline 'order-collectives' has no options; list its passes instead

// Options of C++ passes.
// RUN: %{refused} 'cse{fast}' | filecheck %s --check-prefix=CXXOPTION
// CXXOPTION: error: pass cse{fast}: {{.*}}no such option fast

// RUN: %{refused} 'sdy-insert-explicit-reshards{enable=true}' | filecheck %s --check-prefix=FUNCTION
// FUNCTION: error: pass sdy-insert-explicit-reshards{enable=true}: {{.*}}no such option enable

// RUN: %{refused} 'canonicalize{max-iterations=two}' | filecheck %s --check-prefix=CXXVALUE
// CXXVALUE: error: pass canonicalize{max-iterations=two}:

// Syntax.
// RUN: %{refused} '' | filecheck %s --check-prefix=EMPTY
// RUN: %{refused} ' ' | filecheck %s --check-prefix=EMPTY
// EMPTY: error: the pipeline is empty
// EMPTY-NEXT: try: stablehlo-tools opt --list-passes

// RUN: %{refused} 'cse,' | filecheck %s --check-prefix=COMMA
// RUN: %{refused} ',cse' | filecheck %s --check-prefix=COMMA
// RUN: %{refused} 'cse,,canonicalize' | filecheck %s --check-prefix=COMMA
// COMMA: error: pipeline '{{.*}}': expected a pass name, found ''

// RUN: %{refused} 'cse canonicalize' | filecheck %s --check-prefix=SPACE
// SPACE: error: pipeline 'cse canonicalize': expected {…} after cse, not 'canonicalize'

// RUN: %{refused} 'thread-tokens{form=barrier' | filecheck %s --check-prefix=OPEN
// OPEN: error: pipeline 'thread-tokens{form=barrier': '}' is missing at the end

// RUN: %{refused} 'cse}' | filecheck %s --check-prefix=CLOSED
// CLOSED: error: pipeline 'cse}': '}' at 4 matches no opening bracket

// RUN: %{refused} 'thread-tokens{form = barrier}' | filecheck %s --check-prefix=EQUALS
// EQUALS: error: pipeline 'thread-tokens{form = barrier}': '=' is not an option

// RUN: %{refused} 'builtin.module(cse)' | filecheck %s --check-prefix=NESTED
// NESTED: error: pipeline 'builtin.module(cse)': expected {…} after builtin.module, not '(cse)'
