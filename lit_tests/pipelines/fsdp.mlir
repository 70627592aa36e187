// RUN: stablehlo-tools opt %s -p fsdp | tee %t.named | filecheck %s

// A named pipeline is its passes, in order.
// RUN: stablehlo-tools opt %s -p partition,create-reduce-scatter,schedule-overlap | diff -u %t.named -

// Its options go to the passes that have them.
// RUN: stablehlo-tools opt %s -p 'fsdp{hardware=tpu-v5e memory-limit=16}' > %t.options
// RUN: stablehlo-tools opt %s -p 'partition,create-reduce-scatter,schedule-overlap{hardware=tpu-v5e memory-limit=16}' | diff -u %t.options -
// RUN: not stablehlo-tools opt %s -p 'fsdp{hardware=no-such}' 2>&1 | filecheck %s --check-prefix=HARDWARE
// RUN: not stablehlo-tools opt %s -p 'fsdp{axis=data}' 2>&1 | filecheck %s --check-prefix=OPTION
// HARDWARE: error: {{.*}}no-such
// OPTION: error: pipeline 'fsdp' has no option 'axis'; it has: hardware, memory-limit; for others list its passes instead

// The weights of both layers are gathered, and the gradient of a weight is scattered as it is summed.
// CHECK-LABEL: func.func @main
// CHECK-COUNT-2: "stablehlo.all_gather"
// CHECK-NOT: "stablehlo.all_reduce"
// CHECK: "stablehlo.reduce_scatter"
// CHECK-NOT: "stablehlo.all_reduce"
module attributes {mhlo.num_partitions = 8 : i32, mhlo.num_replicas = 1 : i32} {
  sdy.mesh @mesh = <["data"=8]>
  func.func @main(
      %x: tensor<16384x4096xbf16> {sdy.sharding = #sdy.sharding<@mesh, [{"data"}, {}]>},
      %w1: tensor<4096x4096xbf16> {sdy.sharding = #sdy.sharding<@mesh, [{"data"}, {}]>},
      %w2: tensor<4096x4096xbf16> {sdy.sharding = #sdy.sharding<@mesh, [{"data"}, {}]>})
      -> (tensor<16384x4096xbf16> {sdy.sharding = #sdy.sharding<@mesh, [{"data"}, {}]>},
          tensor<4096x4096xbf16> {sdy.sharding = #sdy.sharding<@mesh, [{"data"}, {}]>}) {
    %0 = sdy.sharding_constraint %w1 <@mesh, [{}, {}]> : tensor<4096x4096xbf16>
    %1 = stablehlo.dot_general %x, %0, contracting_dims = [1] x [0] : (tensor<16384x4096xbf16>, tensor<4096x4096xbf16>) -> tensor<16384x4096xbf16>
    %2 = sdy.sharding_constraint %w2 <@mesh, [{}, {}]> : tensor<4096x4096xbf16>
    %3 = stablehlo.dot_general %1, %2, contracting_dims = [1] x [0] : (tensor<16384x4096xbf16>, tensor<4096x4096xbf16>) -> tensor<16384x4096xbf16>
    %4 = stablehlo.dot_general %x, %3, contracting_dims = [0] x [0] : (tensor<16384x4096xbf16>, tensor<16384x4096xbf16>) -> tensor<4096x4096xbf16>
    return %3, %4 : tensor<16384x4096xbf16>, tensor<4096x4096xbf16>
  }
}
