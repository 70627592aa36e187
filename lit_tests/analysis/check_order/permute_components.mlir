// Under an option, XLA:GPU gives each component of a permute's pairs a communicator. It refuses one
// that two permutes ask for with other components beside it: here that of device 0, and of device 3.

// RUN: stablehlo-tools check-order %s | filecheck %s
// CHECK: ordered: 1 program on devices 0 to 3, 3 collectives
// CHECK: not judged: under xla_gpu_collective_permute_connected_components, XLA:GPU opens a communicator for each component of a permute's pairs. The permutes at {{.*}}permute_components.mlir:{{.*}} and {{.*}} request device 0 with different other components: XLA may refuse the second

// RUN: stablehlo-tools check-order %s --json | filecheck %s --check-prefix=OPEN
// OPEN: "not_judged": [
// OPEN-NEXT: "under xla_gpu_collective_permute_connected_components,

// RUN: not stablehlo-tools check-order --target gpu --compiler-option xla_gpu_collective_permute_connected_components=true %s > %t.out
// RUN: filecheck %s --check-prefix=OPTION < %t.out
// RUN: not stablehlo-tools check-order --target gpu --compiler-option xla_gpu_collective_permute_connected_components=true %s --json | filecheck %s --check-prefix=JSON
// OPTION: may-deadlock: under xla_gpu_collective_permute_connected_components, XLA:GPU opens a communicator for each component
// OPTION-NEXT: as scheduled by XLA:GPU of {{.*}}, with xla_gpu_collective_permute_connected_components=true
// JSON: "rule": "permute-components"

// Equal components are asked for together, whichever pairs make them.
// RUN: sed 's/\[\[2, 3\]\]/[[1, 0]]/; s/\[\[1, 2\]\]/[[0, 1]]/' %s > %t.same.mlir
// RUN: stablehlo-tools check-order %t.same.mlir | filecheck %s --check-prefix=SAME
// SAME: ordered: 1 program on devices 0 to 3, 3 collectives
// SAME-NOT: not judged

// HLO text can say that the option is set.
// RUN: sed '1i // xla_gpu_collective_permute_connected_components: true' %S/Inputs/permute_components.hlo > %t.set.hlo
// RUN: not stablehlo-tools check-order %t.set.hlo | filecheck %s --check-prefix=SET
// RUN: stablehlo-tools check-order %S/Inputs/permute_components.hlo | filecheck %s --check-prefix=TEXT
// SET: may-deadlock: under xla_gpu_collective_permute_connected_components, {{.*}} The permutes at {{.*}}set.hlo:6 in main and
// TEXT: not judged: under xla_gpu_collective_permute_connected_components

module attributes {mhlo.num_partitions = 4 : i32} {
  func.func @main(%x: tensor<2xf32>) -> tensor<2xf32> {
    %first = "stablehlo.collective_permute"(%x) <{
        channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>,
        source_target_pairs = dense<[[0, 1]]> : tensor<1x2xi64>}> : (tensor<2xf32>) -> tensor<2xf32>
    %middle = "stablehlo.collective_permute"(%first) <{
        channel_handle = #stablehlo.channel_handle<handle = 2, type = 1>,
        source_target_pairs = dense<[[2, 3]]> : tensor<1x2xi64>}> : (tensor<2xf32>) -> tensor<2xf32>
    %last = "stablehlo.collective_permute"(%middle) <{
        channel_handle = #stablehlo.channel_handle<handle = 3, type = 1>,
        source_target_pairs = dense<[[1, 2]]> : tensor<1x2xi64>}> : (tensor<2xf32>) -> tensor<2xf32>
    %sum = stablehlo.add %first, %last : tensor<2xf32>
    return %sum : tensor<2xf32>
  }
}
