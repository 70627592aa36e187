// RUN: stablehlo-tools opt %s -p thread-tokens -o %t.mlir
// RUN: filecheck %s --check-prefix=THREADED < %t.mlir
// RUN: stablehlo-tools verify %s %t.mlir --backend interpreter | filecheck %s

// Values that collectives exchange in a loop's body, in its condition and in the branches of an if
// and a case within it.
// CHECK: same: 2 outputs, 6 elements, bitwise
// THREADED: stablehlo.while{{.*}}tokens_carried
// THREADED: "stablehlo.case"
// THREADED: "stablehlo.if"
module attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
  func.func @main(%x: tensor<2xf32>) -> (tensor<2xf32>, tensor<i32>) {
    %zero = stablehlo.constant dense<0> : tensor<i32>
    %one = stablehlo.constant dense<1> : tensor<i32>
    %two = stablehlo.constant dense<2> : tensor<i32>
    %five = stablehlo.constant dense<5> : tensor<i32>
    %0:2 = stablehlo.while(%i = %zero, %v = %x) : tensor<i32>, tensor<2xf32>
      cond {
        // Both participants count alike, so that both agree to go on.
        %1 = "stablehlo.all_reduce"(%i) ({
        ^bb0(%a: tensor<i32>, %b: tensor<i32>):
          %most = stablehlo.maximum %a, %b : tensor<i32>
          stablehlo.return %most : tensor<i32>
        }) {
          channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>,
          replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>,
          use_global_device_ids
        } : (tensor<i32>) -> tensor<i32>
        %2 = stablehlo.compare LT, %1, %five : (tensor<i32>, tensor<i32>) -> tensor<i1>
        stablehlo.return %2 : tensor<i1>
      } do {
        %1 = stablehlo.remainder %i, %two : tensor<i32>
        %2 = "stablehlo.case"(%1) ({
          %3 = "stablehlo.collective_permute"(%v) {
            channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>,
            source_target_pairs = dense<[[0, 1], [1, 0]]> : tensor<2x2xi64>
          } : (tensor<2xf32>) -> tensor<2xf32>
          stablehlo.return %3 : tensor<2xf32>
        }, {
          %3 = stablehlo.compare EQ, %i, %one : (tensor<i32>, tensor<i32>) -> tensor<i1>
          %4 = "stablehlo.if"(%3) ({
            %5 = "stablehlo.all_reduce"(%v) ({
            ^bb0(%a: tensor<f32>, %b: tensor<f32>):
              %sum = stablehlo.add %a, %b : tensor<f32>
              stablehlo.return %sum : tensor<f32>
            }) {
              channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>,
              replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>,
              use_global_device_ids
            } : (tensor<2xf32>) -> tensor<2xf32>
            stablehlo.return %5 : tensor<2xf32>
          }, {
            %5 = stablehlo.add %v, %x : tensor<2xf32>
            stablehlo.return %5 : tensor<2xf32>
          }) : (tensor<i1>) -> tensor<2xf32>
          stablehlo.return %4 : tensor<2xf32>
        }) : (tensor<i32>) -> tensor<2xf32>
        %6 = stablehlo.add %i, %one : tensor<i32>
        stablehlo.return %6, %2 : tensor<i32>, tensor<2xf32>
      }
    return %0#1, %0#0 : tensor<2xf32>, tensor<i32>
  }
}
