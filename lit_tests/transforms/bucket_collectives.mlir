// RUN: stablehlo-tools opt %s -p 'bucket-collectives{against=text}' --split-input-file | filecheck %s --enable-var-scope
// RUN: stablehlo-tools opt %s -p 'bucket-collectives{against=text explain}' --split-input-file 2>&1 >%t.mlir | filecheck %s --check-prefix=EXPLAINED

// EXPLAINED: note: 2 all_reduces became one: saves {{.+}} us of latency and adds {{.+}} us of copies
// EXPLAINED-NEXT: note: another of them is here

// Operands that differ in one dimension only are joined along it.
// CHECK-LABEL: module @all_reduce
// CHECK: %[[JOINED:.+]] = stablehlo.concatenate %{{.+}}, %{{.+}}, dim = 1
// CHECK-NEXT: %[[SUM:.+]] = "stablehlo.all_reduce"(%[[JOINED]])
// CHECK: %[[A:.+]] = stablehlo.slice %[[SUM]] [0:4, 0:2]
// CHECK-NEXT: %[[B:.+]] = stablehlo.slice %[[SUM]] [0:4, 2:5]
// CHECK-NEXT: return %[[A]], %[[B]]
module @all_reduce attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
func.func @main(%x: tensor<4x2xf32>, %y: tensor<4x3xf32>) -> (tensor<4x2xf32>, tensor<4x3xf32>) {
  %a = "stablehlo.all_reduce"(%x) ({
  ^bb0(%l: tensor<f32>, %r: tensor<f32>):
    %s = stablehlo.add %l, %r : tensor<f32>
    stablehlo.return %s : tensor<f32>
  }) {replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, use_global_device_ids} : (tensor<4x2xf32>) -> tensor<4x2xf32>
  %b = "stablehlo.all_reduce"(%y) ({
  ^bb0(%l: tensor<f32>, %r: tensor<f32>):
    %s = stablehlo.add %l, %r : tensor<f32>
    stablehlo.return %s : tensor<f32>
  }) {replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, use_global_device_ids} : (tensor<4x3xf32>) -> tensor<4x3xf32>
  return %a, %b : tensor<4x2xf32>, tensor<4x3xf32>
}
}

// -----

// Where every device is a replica, XLA takes several operands: nothing is copied.
// CHECK-LABEL: module @replicas
// CHECK: %[[SUMS:.+]]:2 = "stablehlo.all_reduce"(%{{.+}}, %{{.+}})
// CHECK: return %[[SUMS]]#0, %[[SUMS]]#1
module @replicas attributes {mhlo.num_partitions = 1 : i32, mhlo.num_replicas = 2 : i32} {
func.func @main(%x: tensor<4x2xf32>, %y: tensor<3xf32>) -> (tensor<4x2xf32>, tensor<3xf32>) {
  %a = "stablehlo.all_reduce"(%x) ({
  ^bb0(%l: tensor<f32>, %r: tensor<f32>):
    %s = stablehlo.add %l, %r : tensor<f32>
    stablehlo.return %s : tensor<f32>
  }) {replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>} : (tensor<4x2xf32>) -> tensor<4x2xf32>
  %b = "stablehlo.all_reduce"(%y) ({
  ^bb0(%l: tensor<f32>, %r: tensor<f32>):
    %s = stablehlo.add %l, %r : tensor<f32>
    stablehlo.return %s : tensor<f32>
  }) {replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>} : (tensor<3xf32>) -> tensor<3xf32>
  return %a, %b : tensor<4x2xf32>, tensor<3xf32>
}
}

// -----

// Gathers along different dimensions run along the first, behind the parts of the devices.
// CHECK-LABEL: module @all_gather
// CHECK: %[[JOINED:.+]] = stablehlo.concatenate %{{.+}}, %{{.+}}, dim = 1
// CHECK-NEXT: %[[ALL:.+]] = "stablehlo.all_gather"(%[[JOINED]]) <{all_gather_dim = 0
// CHECK-NEXT: %[[PARTS:.+]] = stablehlo.reshape %[[ALL]] : (tensor<8x5xf32>) -> tensor<2x4x5xf32>
// CHECK-NEXT: %[[X:.+]] = stablehlo.slice %[[PARTS]] [0:2, 0:4, 0:2]
// CHECK-NEXT: %[[Y:.+]] = stablehlo.slice %[[PARTS]] [0:2, 0:4, 2:5]
// CHECK-NEXT: %[[TURNED:.+]] = stablehlo.transpose %[[X]], dims = [1, 0, 2]
// CHECK-NEXT: %[[A:.+]] = stablehlo.reshape %[[TURNED]] : (tensor<4x2x2xf32>) -> tensor<4x4xf32>
// CHECK-NEXT: %[[B:.+]] = stablehlo.reshape %[[Y]] : (tensor<2x4x3xf32>) -> tensor<8x3xf32>
// CHECK-NEXT: return %[[A]], %[[B]]
module @all_gather attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
func.func @main(%x: tensor<4x2xf32>, %y: tensor<4x3xf32>) -> (tensor<4x4xf32>, tensor<8x3xf32>) {
  %a = "stablehlo.all_gather"(%x) {all_gather_dim = 1 : i64, replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, use_global_device_ids} : (tensor<4x2xf32>) -> tensor<4x4xf32>
  %b = "stablehlo.all_gather"(%y) {all_gather_dim = 0 : i64, replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, use_global_device_ids} : (tensor<4x3xf32>) -> tensor<8x3xf32>
  return %a, %b : tensor<4x4xf32>, tensor<8x3xf32>
}
}

// -----

// A reduce_scatter takes one operand. Pieces of different shapes lie flat beside each other.
// CHECK-LABEL: module @reduce_scatter
// CHECK: %[[JOINED:.+]] = stablehlo.concatenate %{{.+}}, %{{.+}}, dim = 1 : (tensor<2x4xf32>, tensor<2x9xf32>)
// CHECK-NEXT: %[[FLAT:.+]] = stablehlo.reshape %[[JOINED]] : (tensor<2x13xf32>) -> tensor<26xf32>
// CHECK-NEXT: %[[SUM:.+]] = "stablehlo.reduce_scatter"(%[[FLAT]])
// CHECK: %[[A:.+]] = stablehlo.slice %[[SUM]] [0:4]
// CHECK-NEXT: %[[B:.+]] = stablehlo.slice %[[SUM]] [4:13]
// CHECK-NEXT: stablehlo.reshape %[[A]] : (tensor<4xf32>) -> tensor<2x2xf32>
// CHECK-NEXT: stablehlo.reshape %[[B]] : (tensor<9xf32>) -> tensor<3x3xf32>
module @reduce_scatter attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
func.func @main(%x: tensor<4x2xf32>, %y: tensor<6x3xf32>) -> (tensor<2x2xf32>, tensor<3x3xf32>) {
  %a = "stablehlo.reduce_scatter"(%x) ({
  ^bb0(%l: tensor<f32>, %r: tensor<f32>):
    %s = stablehlo.add %l, %r : tensor<f32>
    stablehlo.return %s : tensor<f32>
  }) {scatter_dimension = 0 : i64, replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, use_global_device_ids} : (tensor<4x2xf32>) -> tensor<2x2xf32>
  %b = "stablehlo.reduce_scatter"(%y) ({
  ^bb0(%l: tensor<f32>, %r: tensor<f32>):
    %s = stablehlo.add %l, %r : tensor<f32>
    stablehlo.return %s : tensor<f32>
  }) {scatter_dimension = 0 : i64, replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, use_global_device_ids} : (tensor<6x3xf32>) -> tensor<3x3xf32>
  return %a, %b : tensor<2x2xf32>, tensor<3x3xf32>
}
}

// -----

// An all_to_all of several operands would mean something else to XLA.
// CHECK-LABEL: module @all_to_all
// CHECK: stablehlo.concatenate %{{.+}}, %{{.+}}, dim = 2
// CHECK: %[[ALL:.+]] = "stablehlo.all_to_all"(%{{[^,]+}}) <{{.*}}concat_dimension = 0{{.*}}split_dimension = 0
// CHECK-NOT: stablehlo.all_to_all
// CHECK: stablehlo.slice %{{.+}} [0:2, 0:2, 0:2]
// CHECK: stablehlo.slice %{{.+}} [0:2, 0:2, 2:5]
module @all_to_all attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
func.func @main(%x: tensor<4x2xf32>, %y: tensor<4x3xf32>) -> (tensor<2x4xf32>, tensor<2x6xf32>) {
  %a = "stablehlo.all_to_all"(%x) {split_dimension = 0 : i64, concat_dimension = 1 : i64, split_count = 2 : i64, replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>} : (tensor<4x2xf32>) -> tensor<2x4xf32>
  %b = "stablehlo.all_to_all"(%y) {split_dimension = 0 : i64, concat_dimension = 1 : i64, split_count = 2 : i64, replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>} : (tensor<4x3xf32>) -> tensor<2x6xf32>
  return %a, %b : tensor<2x4xf32>, tensor<2x6xf32>
}
}

// -----

// In the body of a loop.
// CHECK-LABEL: module @loop
// CHECK: stablehlo.while
// CHECK: do {
// CHECK: stablehlo.concatenate
// CHECK-NEXT: "stablehlo.all_reduce"
// CHECK-NOT: stablehlo.all_reduce
// CHECK: stablehlo.slice
// CHECK-NEXT: stablehlo.slice
module @loop attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
func.func @main(%x: tensor<4x2xf32>, %y: tensor<4x3xf32>) -> (tensor<4x2xf32>, tensor<4x3xf32>) {
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %one = stablehlo.constant dense<1> : tensor<i32>
  %four = stablehlo.constant dense<4> : tensor<i32>
  %w:3 = stablehlo.while(%i = %zero, %p = %x, %q = %y) : tensor<i32>, tensor<4x2xf32>, tensor<4x3xf32>
  cond {
    %c = stablehlo.compare LT, %i, %four : (tensor<i32>, tensor<i32>) -> tensor<i1>
    stablehlo.return %c : tensor<i1>
  } do {
  %j = stablehlo.add %i, %one : tensor<i32>
  %a = "stablehlo.all_reduce"(%p) ({
  ^bb0(%l: tensor<f32>, %r: tensor<f32>):
    %s = stablehlo.add %l, %r : tensor<f32>
    stablehlo.return %s : tensor<f32>
  }) {replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, use_global_device_ids} : (tensor<4x2xf32>) -> tensor<4x2xf32>
  %b = "stablehlo.all_reduce"(%q) ({
  ^bb0(%l: tensor<f32>, %r: tensor<f32>):
    %s = stablehlo.add %l, %r : tensor<f32>
    stablehlo.return %s : tensor<f32>
  }) {replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, use_global_device_ids} : (tensor<4x3xf32>) -> tensor<4x3xf32>
    stablehlo.return %j, %a, %b : tensor<i32>, tensor<4x2xf32>, tensor<4x3xf32>
  }
  return %w#1, %w#2 : tensor<4x2xf32>, tensor<4x3xf32>
}
}

// -----

// Calls are inlined where what is merged stands in several of them.
// CHECK-LABEL: module @calls
// CHECK: func.func @main
// CHECK-NOT: call
// CHECK: stablehlo.concatenate
// CHECK-NEXT: "stablehlo.all_reduce"
// CHECK-NOT: stablehlo.all_reduce
module @calls attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
func.func private @sum(%x: tensor<4x2xf32>) -> tensor<4x2xf32> {
  %a = "stablehlo.all_reduce"(%x) ({
  ^bb0(%l: tensor<f32>, %r: tensor<f32>):
    %s = stablehlo.add %l, %r : tensor<f32>
    stablehlo.return %s : tensor<f32>
  }) {replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, use_global_device_ids} : (tensor<4x2xf32>) -> tensor<4x2xf32>
  return %a : tensor<4x2xf32>
}
func.func @main(%x: tensor<4x2xf32>, %y: tensor<4x2xf32>) -> (tensor<4x2xf32>, tensor<4x2xf32>) {
  %a = call @sum(%x) : (tensor<4x2xf32>) -> tensor<4x2xf32>
  %b = call @sum(%y) : (tensor<4x2xf32>) -> tensor<4x2xf32>
  return %a, %b : tensor<4x2xf32>, tensor<4x2xf32>
}
}

// -----

// Layouts of results and what describes an op say nothing of values: they are left out where they
// are not those of all of them.
// CHECK-LABEL: module @described
// CHECK-NOT: result_layout
// CHECK-NOT: xla_shape
// CHECK: "stablehlo.all_gather"
// CHECK-SAME: mhlo.frontend_attributes = {group = "weights"}
// CHECK-NOT: "stablehlo.all_gather"
module @described attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
func.func @main(%x: tensor<4x2xf32>, %y: tensor<4x3xf32>) -> (tensor<8x2xf32>, tensor<8x3xf32>) {
  %a = "stablehlo.all_gather"(%x) {mhlo.frontend_attributes = {layer = "0", early = "1", group = "weights"}, result_layout = dense<[0, 1]> : tensor<2xindex>, xla_shape = "f32[8,2]{0,1}", all_gather_dim = 0 : i64, replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, use_global_device_ids} : (tensor<4x2xf32>) -> tensor<8x2xf32>
  %b = "stablehlo.all_gather"(%y) {mhlo.frontend_attributes = {layer = "1", late = "1", group = "weights"}, all_gather_dim = 0 : i64, replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, use_global_device_ids} : (tensor<4x3xf32>) -> tensor<8x3xf32>
  return %a, %b : tensor<8x2xf32>, tensor<8x3xf32>
}
}
