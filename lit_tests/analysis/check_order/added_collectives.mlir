// What XLA's partitioner adds is in no program: several programs are refused where it may add some.

// RUN: stablehlo-tools check-order --target none %s | filecheck %s --check-prefix=ONE
// RUN: stablehlo-tools check-order --target none %s %s | filecheck %s
// ONE: ordered: 1 program on devices 0 and 1, 1 collective
// CHECK: ordered: 2 programs on devices 0 and 1, 2 collectives

// An op beside the manual computation.
// RUN: sed 's/^    return %y/    %z = stablehlo.reverse %y, dims = [0] : tensor<4xf32>\n    return %z/' %s > %t.beside.mlir
// RUN: stablehlo-tools check-order --target none %t.beside.mlir | filecheck %s --check-prefix=ONE
// RUN: python %{inputs}/expect_refusal.py stablehlo-tools check-order --target none %t.beside.mlir %t.beside.mlir | filecheck %s --check-prefix=BESIDE
// RUN: stablehlo-tools check-order --target none %t.beside.mlir %t.beside.mlir --trust-partitioner | filecheck %s
// BESIDE: beside.mlir:{{[0-9]+:[0-9]+}}: error: stablehlo.reverse is outside every manual computation, where XLA's partitioner may add collectives that are not in the program: partition it first (or give --trust-partitioner, if you know that it adds none)
// BESIDE: try: stablehlo-tools opt {{.*}}beside.mlir -p partition,create-reduce-scatter -o {{.*}}beside.explicit.mlir{{$}}

// One that is elementwise, and leaves values sharded as they are.
// RUN: sed 's/^    return %y/    %z = stablehlo.sine %y : tensor<4xf32>\n    return %z/' %s > %t.sine.mlir
// RUN: stablehlo-tools check-order --target none %t.sine.mlir %t.sine.mlir | filecheck %s

// A value that is sharded otherwise than the manual computation takes it, or gives it.
// RUN: sed 's/%x: tensor<4xf32>)/%x: tensor<4xf32> {sdy.sharding = #sdy.sharding<@mesh, [{}]>})/' %s > %t.taken.mlir
// RUN: python %{inputs}/expect_refusal.py stablehlo-tools check-order --target none %t.taken.mlir %t.taken.mlir | filecheck %s --check-prefix=TAKEN
// RUN: sed 's/%x: tensor<4xf32>)/%x: tensor<4xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}]>})/' %s > %t.same.mlir
// RUN: stablehlo-tools check-order --target none %t.same.mlir %t.same.mlir | filecheck %s
// TAKEN: taken.mlir:{{.*}}: error: sdy.manual_computation takes a value that is sharded in another way, where XLA's partitioner may add collectives
module attributes {mhlo.num_replicas = 1 : i32, mhlo.num_partitions = 2 : i32} {
  sdy.mesh @mesh = <["x"=2]>
  func.func @main(%x: tensor<4xf32>) -> tensor<4xf32> {
    %y = sdy.manual_computation(%x) in_shardings=[<@mesh, [{"x"}]>] out_shardings=[<@mesh, [{"x"}]>]
        manual_axes={"x"} (%v: tensor<2xf32>) {
      %w = "stablehlo.collective_permute"(%v) {
        channel_handle = #stablehlo.channel_handle<handle = 1, type = 0>,
        source_target_pairs = dense<[[0, 1], [1, 0]]> : tensor<2x2xi64>
      } : (tensor<2xf32>) -> tensor<2xf32>
      sdy.return %w : tensor<2xf32>
    } : (tensor<4xf32>) -> tensor<4xf32>
    return %y : tensor<4xf32>
  }
}
