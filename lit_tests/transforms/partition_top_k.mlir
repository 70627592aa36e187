// RUN: stablehlo-tools opt %s -p partition --split-input-file | filecheck %s --enable-var-scope

// Only the first rows of a sort are read: each device sorts its part, and all sort their first rows.
// Devices number their own rows.
sdy.mesh @mesh = <["x"=4]>
// CHECK-LABEL: func.func @first_rows
// CHECK: sdy.manual_computation{{.*}} (%[[X:.+]]: tensor<2x32xf32>)
// CHECK: %[[ROWS:.+]] = stablehlo.iota dim = 1 : tensor<2x32xi32>
// CHECK: %[[PART:.+]]:2 = "stablehlo.sort"(%[[X]], %[[ROWS]])
// CHECK: %[[KEYS:.+]] = stablehlo.slice %[[PART]]#0 [0:2, 0:3]
// CHECK: %[[OWN:.+]] = stablehlo.slice %[[PART]]#1 [0:2, 0:3]
// CHECK: %[[GLOBAL:.+]] = stablehlo.add {{.*}} %[[OWN]] : tensor<2x3xi32>
// CHECK: "stablehlo.all_gather"(%[[KEYS]]){{.*}} (tensor<2x3xf32>) -> tensor<2x12xf32>
// CHECK: "stablehlo.all_gather"(%[[GLOBAL]])
// CHECK: "stablehlo.sort"{{.*}}is_stable = true
// CHECK: (tensor<2x12xf32>, tensor<2x12xi32>)
// CHECK-NOT: stablehlo.all_to_all
func.func @first_rows(%x: tensor<2x128xf32> {sdy.sharding = #sdy.sharding<@mesh, [{}, {"x"}]>}) -> (tensor<2x3xf32> {sdy.sharding = #sdy.sharding<@mesh, [{}, {}]>}, tensor<2x3xi32> {sdy.sharding = #sdy.sharding<@mesh, [{}, {}]>}) {
  %rows = stablehlo.iota dim = 1 : tensor<2x128xi32>
  %0:2 = "stablehlo.sort"(%x, %rows) <{dimension = 1 : i64, is_stable = true}> ({
  ^bb0(%a: tensor<f32>, %b: tensor<f32>, %c: tensor<i32>, %d: tensor<i32>):
    %1 = stablehlo.compare GT, %a, %b, TOTALORDER : (tensor<f32>, tensor<f32>) -> tensor<i1>
    stablehlo.return %1 : tensor<i1>
  }) : (tensor<2x128xf32>, tensor<2x128xi32>) -> (tensor<2x128xf32>, tensor<2x128xi32>)
  %2 = stablehlo.slice %0#0 [0:2, 0:3] : (tensor<2x128xf32>) -> tensor<2x3xf32>
  %3 = stablehlo.slice %0#1 [0:2, 0:3] : (tensor<2x128xi32>) -> tensor<2x3xi32>
  return %2, %3 : tensor<2x3xf32>, tensor<2x3xi32>
}

// -----

// Only the last rows are read. The comparator captures a constant.
sdy.mesh @mesh = <["x"=4]>
// CHECK-LABEL: func.func @last_rows
// CHECK: %[[PART:.+]] = "stablehlo.sort"{{.*}}
// CHECK: (tensor<32xf32>) -> tensor<32xf32>
// CHECK: stablehlo.slice %[[PART]] [30:32]
// CHECK: %[[ALL:.+]] = "stablehlo.sort"
// CHECK: (tensor<8xf32>) -> tensor<8xf32>
// CHECK: stablehlo.slice %[[ALL]] [6:8]
// CHECK: stablehlo.slice %[[ALL]] [7:8]
func.func @last_rows(%x: tensor<128xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}]>}) -> (tensor<2xf32>, tensor<1xf32>) {
  %zero = stablehlo.constant dense<0.0> : tensor<f32>
  %0 = "stablehlo.sort"(%x) <{dimension = 0 : i64}> ({
  ^bb0(%a: tensor<f32>, %b: tensor<f32>):
    %1 = stablehlo.maximum %a, %zero : tensor<f32>
    %2 = stablehlo.compare LT, %1, %b : (tensor<f32>, tensor<f32>) -> tensor<i1>
    stablehlo.return %2 : tensor<i1>
  }) : (tensor<128xf32>) -> tensor<128xf32>
  %3 = stablehlo.slice %0 [126:128] : (tensor<128xf32>) -> tensor<2xf32>
  %4 = stablehlo.slice %0 [127:128] : (tensor<128xf32>) -> tensor<1xf32>
  return %3, %4 : tensor<2xf32>, tensor<1xf32>
}

// -----

// Not rewritten: more candidates than a part has rows, a step, and a reader of all rows.
sdy.mesh @mesh = <["x"=4]>
// CHECK-LABEL: func.func @all_rows
// CHECK-COUNT-3: stablehlo.sort
// CHECK-NOT: stablehlo.sort
func.func @all_rows(%x: tensor<4x64xi32> {sdy.sharding = #sdy.sharding<@mesh, [{}, {"x"}]>}) -> (tensor<4x8xi32>, tensor<4x2xi32>, tensor<4x64xi32>, tensor<4x2xi32>) {
  %0 = "stablehlo.sort"(%x) <{dimension = 1 : i64, is_stable = true}> ({
  ^bb0(%a: tensor<i32>, %b: tensor<i32>):
    %c = stablehlo.compare LT, %a, %b : (tensor<i32>, tensor<i32>) -> tensor<i1>
    stablehlo.return %c : tensor<i1>
  }) : (tensor<4x64xi32>) -> tensor<4x64xi32>
  %1 = stablehlo.slice %0 [0:4, 0:8] : (tensor<4x64xi32>) -> tensor<4x8xi32>
  %2 = "stablehlo.sort"(%x) <{dimension = 1 : i64, is_stable = true}> ({
  ^bb0(%a: tensor<i32>, %b: tensor<i32>):
    %c = stablehlo.compare GT, %a, %b : (tensor<i32>, tensor<i32>) -> tensor<i1>
    stablehlo.return %c : tensor<i1>
  }) : (tensor<4x64xi32>) -> tensor<4x64xi32>
  %3 = stablehlo.slice %2 [0:4, 0:4:2] : (tensor<4x64xi32>) -> tensor<4x2xi32>
  %4 = stablehlo.negate %x : tensor<4x64xi32>
  %5 = "stablehlo.sort"(%4) <{dimension = 1 : i64, is_stable = true}> ({
  ^bb0(%a: tensor<i32>, %b: tensor<i32>):
    %c = stablehlo.compare LT, %a, %b : (tensor<i32>, tensor<i32>) -> tensor<i1>
    stablehlo.return %c : tensor<i1>
  }) : (tensor<4x64xi32>) -> tensor<4x64xi32>
  %6 = stablehlo.slice %5 [0:4, 0:2] : (tensor<4x64xi32>) -> tensor<4x2xi32>
  return %1, %3, %5, %6 : tensor<4x8xi32>, tensor<4x2xi32>, tensor<4x64xi32>, tensor<4x2xi32>
}

// -----

// Not rewritten: a sort of no rows, and one of which no row is read.
sdy.mesh @mesh = <["x"=4]>
// CHECK-LABEL: func.func @no_rows
// CHECK-COUNT-2: stablehlo.sort
// CHECK-NOT: stablehlo.sort
func.func @no_rows(%x: tensor<0xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}]>}, %y: tensor<64xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}]>}) -> (tensor<0xf32>, tensor<0xf32>) {
  %0 = "stablehlo.sort"(%x) <{dimension = 0 : i64}> ({
  ^bb0(%a: tensor<f32>, %b: tensor<f32>):
    %2 = stablehlo.compare LT, %a, %b : (tensor<f32>, tensor<f32>) -> tensor<i1>
    stablehlo.return %2 : tensor<i1>
  }) : (tensor<0xf32>) -> tensor<0xf32>
  %1 = "stablehlo.sort"(%y) <{dimension = 0 : i64}> ({
  ^bb0(%a: tensor<f32>, %b: tensor<f32>):
    %2 = stablehlo.compare LT, %a, %b : (tensor<f32>, tensor<f32>) -> tensor<i1>
    stablehlo.return %2 : tensor<i1>
  }) : (tensor<64xf32>) -> tensor<64xf32>
  %3 = stablehlo.slice %1 [0:0] : (tensor<64xf32>) -> tensor<0xf32>
  return %0, %3 : tensor<0xf32>, tensor<0xf32>
}

// -----

// The largest rows of an ascending sort, reversed (jnp.sort(x, descending=True)[:2]): its last rows.
sdy.mesh @mesh = <["x"=4]>
// CHECK-LABEL: func.func @descending
// CHECK: %[[PART:.+]] = "stablehlo.sort"{{.*}}
// CHECK: (tensor<32xf32>) -> tensor<32xf32>
// CHECK: stablehlo.slice %[[PART]] [30:32]
// CHECK: "stablehlo.all_gather"{{.*}} (tensor<2xf32>) -> tensor<8xf32>
// CHECK: %[[ALL:.+]] = "stablehlo.sort"
// CHECK: (tensor<8xf32>) -> tensor<8xf32>
// CHECK: %[[LAST:.+]] = stablehlo.slice %[[ALL]] [6:8]
// CHECK-NEXT: stablehlo.reverse %[[LAST]], dims = [0] : tensor<2xf32>
func.func @descending(%x: tensor<128xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}]>}) -> (tensor<2xf32> {sdy.sharding = #sdy.sharding<@mesh, [{}]>}) {
  %0 = "stablehlo.sort"(%x) <{dimension = 0 : i64, is_stable = true}> ({
  ^bb0(%a: tensor<f32>, %b: tensor<f32>):
    %3 = stablehlo.compare LT, %a, %b, TOTALORDER : (tensor<f32>, tensor<f32>) -> tensor<i1>
    stablehlo.return %3 : tensor<i1>
  }) : (tensor<128xf32>) -> tensor<128xf32>
  %1 = stablehlo.reverse %0, dims = [0] : tensor<128xf32>
  %2 = stablehlo.slice %1 [0:2] : (tensor<128xf32>) -> tensor<2xf32>
  return %2 : tensor<2xf32>
}

// -----

// jnp.argsort(x, descending=True)[:2] reverses operands and results: a sort in the opposite order.
sdy.mesh @mesh = <["x"=4]>
// CHECK-LABEL: func.func @descending_places
// CHECK-NOT: stablehlo.reverse
// CHECK: sdy.manual_computation{{.*}} (%[[X:.+]]: tensor<32xf32>)
// CHECK: %[[ROWS:.+]] = stablehlo.iota dim = 0 : tensor<32xi32>
// CHECK: "stablehlo.sort"(%[[X]], %[[ROWS]])
// CHECK-NEXT: ^bb0(%[[A:.+]]: tensor<f32>, %[[B:.+]]: tensor<f32>, %{{.+}}: tensor<i32>, %{{.+}}: tensor<i32>):
// CHECK-NEXT: stablehlo.compare LT, %[[B]], %[[A]]
// CHECK-NOT: stablehlo.reverse
func.func @descending_places(%x: tensor<128xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}]>}) -> (tensor<2xi32> {sdy.sharding = #sdy.sharding<@mesh, [{}]>}) {
  %rows = stablehlo.iota dim = 0 : tensor<128xi32>
  %y = stablehlo.reverse %x, dims = [0] : tensor<128xf32>
  %places = stablehlo.reverse %rows, dims = [0] : tensor<128xi32>
  %0:2 = "stablehlo.sort"(%y, %places) <{dimension = 0 : i64, is_stable = true}> ({
  ^bb0(%a: tensor<f32>, %b: tensor<f32>, %c: tensor<i32>, %d: tensor<i32>):
    %3 = stablehlo.compare LT, %a, %b, TOTALORDER : (tensor<f32>, tensor<f32>) -> tensor<i1>
    stablehlo.return %3 : tensor<i1>
  }) : (tensor<128xf32>, tensor<128xi32>) -> (tensor<128xf32>, tensor<128xi32>)
  %1 = stablehlo.reverse %0#1, dims = [0] : tensor<128xi32>
  %2 = stablehlo.slice %1 [0:2] : (tensor<128xi32>) -> tensor<2xi32>
  return %2 : tensor<2xi32>
}
