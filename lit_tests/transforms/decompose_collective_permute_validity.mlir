// RUN: stablehlo-tools opt %s -p 'decompose-collective-permute{form=collective-permute validity}' --split-input-file | tee %t.permutes.mlir | filecheck %s --enable-var-scope
// RUN: stablehlo-tools opt %s -p 'break-permute-cycles,decompose-collective-permute{validity}' --split-input-file > %t.transfers.mlir
// RUN: filecheck %s --enable-var-scope --check-prefix=SENDS --input-file %t.transfers.mlir
// RUN: stablehlo-tools opt %s -p 'decompose-collective-permute{form=collective-permute validity explain}' --split-input-file 2>&1 >%t.explained.mlir | filecheck %s --check-prefix=EXPLAINED
// RUN: diff %t.permutes.mlir %t.explained.mlir

// EXPLAINED: note: collective_permute: edge 0>1 is needed in iterations 0 to 3 of 7; edge 1>2 is needed in iterations 1 to 4 of 7; edge 2>3 is needed in iterations 2 to 5 of 7; 9 of 21 transfers are skipped
// EXPLAINED: note: collective_permute: edges 0>1, 1>2, 2>3, 3>0 are needed in iterations 0 to 2 of 4; 4 of 16 transfers are skipped
// EXPLAINED: note: collective_permute: edge 0>1 is needed in iterations 0 to 3 of 4; edge 1>2 is never needed; 4 of 8 transfers are skipped

// A second run changes nothing.
// RUN: stablehlo-tools opt %t.permutes.mlir -p 'decompose-collective-permute{form=collective-permute validity}' --split-input-file | diff %t.permutes.mlir -

// A pipeline of four stages and four microbatches: edge s>s+1 runs in iterations s to s + 3, and the
// sets of edges that run together are looked up by the counter. The branches of the sends take the
// loop's token and give back their own.
// CHECK-LABEL: module @gpipe
// CHECK: stablehlo.while(%[[I:.+]] = %{{.+}}, %{{.+}} = %{{.+}}, %{{.+}} = %{{.+}})
// CHECK: %[[COMPUTED:.+]] = stablehlo.tanh
// CHECK-NEXT: %[[TABLE:.+]] = stablehlo.constant dense<[0, 1, 2, 2, 3, 4, 5]> : tensor<7xi32>
// CHECK-NEXT: %[[LOOKED:.+]] = stablehlo.dynamic_slice %[[TABLE]], %[[I]], sizes = [1]
// CHECK-NEXT: %[[FORM:.+]] = stablehlo.reshape %[[LOOKED]] : (tensor<1xi32>) -> tensor<i32>
// CHECK-NEXT: %[[SENT:.+]] = "stablehlo.case"(%[[FORM]]) ({
// CHECK-NEXT: "stablehlo.collective_permute"(%[[COMPUTED]]) <{{.+}} dense<{{\[\[}}0, 1]]>
// CHECK: "stablehlo.collective_permute"(%[[COMPUTED]]) <{{.+}} dense<{{\[\[}}0, 1], [1, 2]]>
// CHECK: "stablehlo.collective_permute"(%[[COMPUTED]]) <{{.+}} dense<{{\[\[}}0, 1], [1, 2], [2, 3]]>
// CHECK: "stablehlo.collective_permute"(%[[COMPUTED]]) <{{.+}} dense<{{\[\[}}1, 2], [2, 3]]>
// CHECK: "stablehlo.collective_permute"(%[[COMPUTED]]) <{{.+}} dense<{{\[\[}}2, 3]]>
// CHECK: }, {
// CHECK-NEXT: %[[NONE:.+]] = stablehlo.constant dense<0.000000e+00> : tensor<2xf32>
// CHECK-NEXT: stablehlo.return %[[NONE]] : tensor<2xf32>
// CHECK-NEXT: })
// CHECK: stablehlo.return %{{.+}}, %[[SENT]], %{{.+}} : tensor<i32>, tensor<2xf32>, tensor<4x2xf32>

// SENDS-LABEL: module @gpipe
// SENDS: %[[ROOT:.+]] = stablehlo.after_all : !stablehlo.token
// SENDS-NEXT: stablehlo.while({{.+}}, %[[TOKEN:.+]] = %[[ROOT]])
// SENDS: %[[COMPUTED:.+]] = stablehlo.tanh
// SENDS: %[[SENT:.+]]:2 = "stablehlo.case"(%{{.+}}) ({
// SENDS-NEXT: %[[A:.+]]:2 = "stablehlo.recv"(%[[TOKEN]]) <{{.+}}handle = 2, {{.+}} dense<{{\[\[}}0, 1]]>
// SENDS-NEXT: %[[B:.+]] = "stablehlo.send"(%[[COMPUTED]], %[[TOKEN]]) <{{.+}}handle = 2, {{.+}} dense<{{\[\[}}0, 1]]>
// SENDS-NEXT: %[[BOTH:.+]] = stablehlo.after_all %[[A]]#1, %[[B]]
// SENDS-NEXT: stablehlo.return %[[A]]#0, %[[BOTH]] : tensor<2xf32>, !stablehlo.token
// SENDS: "stablehlo.recv"(%[[TOKEN]]) <{{.+}}handle = 6, {{.+}} dense<{{\[\[}}2, 3]]>
// SENDS: }, {
// SENDS-NEXT: %[[NONE:.+]] = stablehlo.constant dense<0.000000e+00> : tensor<2xf32>
// SENDS-NEXT: stablehlo.return %[[NONE]], %[[TOKEN]] : tensor<2xf32>, !stablehlo.token
// SENDS-NEXT: })
// SENDS: stablehlo.return %{{.+}}, %[[SENT]]#0, %{{.+}}, %[[SENT]]#1 : tensor<i32>, tensor<2xf32>, tensor<4x2xf32>, !stablehlo.token
module @gpipe attributes {mhlo.num_partitions = 4 : i32, mhlo.num_replicas = 1 : i32} {
func.func @main(%in: tensor<4x2xf32>, %garbage: tensor<2xf32>) -> tensor<4x2xf32> {
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %one = stablehlo.constant dense<1> : tensor<i32>
  %three = stablehlo.constant dense<3> : tensor<i32>
  %seven = stablehlo.constant dense<7> : tensor<i32>
  %zeros = stablehlo.constant dense<0.0> : tensor<4x2xf32>
  %id = stablehlo.partition_id : tensor<ui32>
  %stage = stablehlo.convert %id : (tensor<ui32>) -> tensor<i32>
  %is_first = stablehlo.compare EQ, %stage, %zero : (tensor<i32>, tensor<i32>) -> tensor<i1>
  %is_last = stablehlo.compare EQ, %stage, %three : (tensor<i32>, tensor<i32>) -> tensor<i1>
  %w:3 = stablehlo.while(%i = %zero, %arriving = %garbage, %out = %in) : tensor<i32>, tensor<2xf32>, tensor<4x2xf32>
  cond {
    %c = stablehlo.compare LT, %i, %seven : (tensor<i32>, tensor<i32>) -> tensor<i1>
    stablehlo.return %c : tensor<i1>
  } do {
    %at = stablehlo.minimum %i, %three : tensor<i32>
    %row = stablehlo.dynamic_slice %in, %at, %zero, sizes = [1, 2] : (tensor<4x2xf32>, tensor<i32>, tensor<i32>) -> tensor<1x2xf32>
    %fed = stablehlo.reshape %row : (tensor<1x2xf32>) -> tensor<2xf32>
    %taken = stablehlo.select %is_first, %fed, %arriving : tensor<i1>, tensor<2xf32>
    %computed = stablehlo.tanh %taken : tensor<2xf32>
    %sent = "stablehlo.collective_permute"(%computed) {channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, source_target_pairs = dense<[[0, 1], [1, 2], [2, 3]]> : tensor<3x2xi64>} : (tensor<2xf32>) -> tensor<2xf32>
    %back = stablehlo.subtract %i, %three : tensor<i32>
    %number = stablehlo.maximum %back, %zero : tensor<i32>
    %new = stablehlo.reshape %computed : (tensor<2xf32>) -> tensor<1x2xf32>
    %kept = stablehlo.dynamic_update_slice %out, %new, %number, %zero : (tensor<4x2xf32>, tensor<1x2xf32>, tensor<i32>, tensor<i32>) -> tensor<4x2xf32>
    %j = stablehlo.add %i, %one : tensor<i32>
    stablehlo.return %j, %sent, %kept : tensor<i32>, tensor<2xf32>, tensor<4x2xf32>
  }
  %wanted = stablehlo.select %is_last, %w#2, %zeros : tensor<i1>, tensor<4x2xf32>
  return %wanted : tensor<4x2xf32>
}
}

// -----

// A ring whose last round nobody reads, in a function that the loop calls and that counts down: an
// `if` on the counter, where the call was.
// CHECK-LABEL: module @last_round
// CHECK-NOT: call
// CHECK: stablehlo.while(%[[I:.+]] = %{{.+}}, %[[P:.+]] = %{{.+}}, %{{.+}} = %{{.+}})
// CHECK: do
// CHECK: %[[LAST:.+]] = stablehlo.constant dense<2> : tensor<i32>
// CHECK-NEXT: %[[WHETHER:.+]] = stablehlo.compare GE, %[[I]], %[[LAST]]
// CHECK-NEXT: %[[GONE:.+]] = "stablehlo.if"(%[[WHETHER]]) ({
// CHECK-NEXT: "stablehlo.collective_permute"(%[[P]]) <{{.+}} dense<{{\[\[}}0, 1], [1, 2], [2, 3], [3, 0]]>
// CHECK-NEXT: stablehlo.return
// CHECK-NEXT: }, {
// CHECK-NEXT: stablehlo.constant dense<0.000000e+00> : tensor<2xf32>
// CHECK-NOT: call

// SENDS-LABEL: module @last_round
module @last_round attributes {mhlo.num_partitions = 4 : i32, mhlo.num_replicas = 1 : i32} {
func.func private @round(%p: tensor<2xf32>) -> tensor<2xf32> {
  %q = "stablehlo.collective_permute"(%p) {channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, source_target_pairs = dense<[[0, 1], [1, 2], [2, 3], [3, 0]]> : tensor<4x2xi64>} : (tensor<2xf32>) -> tensor<2xf32>
  return %q : tensor<2xf32>
}
func.func @main(%x: tensor<2xf32>) -> tensor<2xf32> {
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %one = stablehlo.constant dense<1> : tensor<i32>
  %four = stablehlo.constant dense<4> : tensor<i32>
  %w:3 = stablehlo.while(%i = %four, %p = %x, %sum = %x) : tensor<i32>, tensor<2xf32>, tensor<2xf32>
  cond {
    %c = stablehlo.compare GT, %i, %zero : (tensor<i32>, tensor<i32>) -> tensor<i1>
    stablehlo.return %c : tensor<i1>
  } do {
    %j = stablehlo.subtract %i, %one : tensor<i32>
    %q = func.call @round(%p) : (tensor<2xf32>) -> tensor<2xf32>
    %s = stablehlo.add %sum, %p : tensor<2xf32>
    stablehlo.return %j, %q, %s : tensor<i32>, tensor<2xf32>, tensor<2xf32>
  }
  return %w#2 : tensor<2xf32>
}
}

// -----

// An edge that nothing ever depends on goes, without a branch.
// CHECK-LABEL: module @never
// CHECK-NOT: "stablehlo.if"
// CHECK-NOT: "stablehlo.case"
// CHECK: "stablehlo.collective_permute"(%{{.+}}) <{{.+}} dense<{{\[\[}}0, 1]]> : tensor<1x2xi64>

// SENDS-LABEL: module @never
// SENDS: "stablehlo.send"(%{{.+}}) <{{.+}} dense<{{\[\[}}0, 1]]> : tensor<1x2xi64>
module @never attributes {mhlo.num_partitions = 4 : i32, mhlo.num_replicas = 1 : i32} {
func.func @main(%x: tensor<2xf32>) -> tensor<2xf32> {
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %one = stablehlo.constant dense<1> : tensor<i32>
  %four = stablehlo.constant dense<4> : tensor<i32>
  %id = stablehlo.partition_id : tensor<ui32>
  %target = stablehlo.constant dense<1> : tensor<ui32>
  %taken = stablehlo.compare EQ, %id, %target : (tensor<ui32>, tensor<ui32>) -> tensor<i1>
  %w:2 = stablehlo.while(%i = %zero, %sum = %x) : tensor<i32>, tensor<2xf32>
  cond {
    %c = stablehlo.compare LT, %i, %four : (tensor<i32>, tensor<i32>) -> tensor<i1>
    stablehlo.return %c : tensor<i1>
  } do {
    %j = stablehlo.add %i, %one : tensor<i32>
    %q = "stablehlo.collective_permute"(%x) {channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, source_target_pairs = dense<[[0, 1], [1, 2]]> : tensor<2x2xi64>} : (tensor<2xf32>) -> tensor<2xf32>
    %t = stablehlo.select %taken, %q, %x : tensor<i1>, tensor<2xf32>
    %s = stablehlo.add %sum, %t : tensor<2xf32>
    stablehlo.return %j, %s : tensor<i32>, tensor<2xf32>
  }
  return %w#1 : tensor<2xf32>
}
}
